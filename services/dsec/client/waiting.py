"""Waiting for sessions: which of them are over, found out from the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from uuid import UUID

from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from dsec.client.queries import Queries
from dsec.platform.engine import is_away

POLL_S_MIN = 0.05
POLL_S_MAX = 0.5
AWAY_S_MAX = 120.0
"""How long the log's database may be away while sessions are waited for."""
AWAY_PAUSE_S_MAX = 5.0

_patiently = AsyncRetrying(
    retry=retry_if_exception(is_away),
    wait=wait_random_exponential(POLL_S_MIN, AWAY_PAUSE_S_MAX),
    stop=stop_after_delay(AWAY_S_MAX),
    reraise=True,
)
"""The sessions go on while the database restarts; so does waiting for them."""


async def finished(queries: Queries, ids: Sequence[UUID]) -> AsyncIterator[list[UUID]]:
    """Sessions as they are over, in the order in which they are found to be."""
    waiting = dict.fromkeys(ids)
    pause_s = POLL_S_MIN
    while waiting:
        over: set[UUID] = await _patiently(_over, queries, list(waiting))
        if over:
            pause_s = POLL_S_MIN
            found = [i for i in waiting if i in over]
            for session_id in found:
                del waiting[session_id]
            yield found
        else:
            pause_s = min(POLL_S_MAX, pause_s * 1.5)
        if waiting:
            await asyncio.sleep(pause_s)


async def _over(queries: Queries, ids: list[UUID]) -> set[UUID]:
    over = await queries.ended(ids)
    return over | (await queries.rejections([i for i in ids if i not in over])).keys()
