"""Quotas: how much of a tool may be used, by a session and at a time.

What a session has used up fails at once: another call of it will do no better. What only has to
wait, for a place or for the next moment, waits within the call's deadline and fails at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from dsec.platform.bounded import Bounded
from dsec.session.tool_document import Quota
from dsec.tool.frames import Failure, Refused

TOOLS_KEPT_MAX = 4096
CODE = "quota"


def used_up(quota: Quota, name: str, number: int, total: int, total_max: int | None) -> str | None:
    """Why a session may not make a call any more; None: it may.

    Args:
        number: which call of the tool it is in the session, from 0.
        total: which call of any tool.
    """
    most = quota.calls_per_session
    if most is not None and number >= most:
        return f"the session has made its {most} calls of {name} (quota.calls_per_session)"
    if total_max is not None and total >= total_max:
        return f"the session has made its {total_max} calls (tool_calls_max)"
    return None


class Quotas:
    """Places and moments of tools, by the hashes of their specs."""

    def __init__(self) -> None:
        self._places: Bounded[str, asyncio.Semaphore] = Bounded(TOOLS_KEPT_MAX)
        self._next_s: Bounded[str, float] = Bounded(TOOLS_KEPT_MAX)

    @contextlib.asynccontextmanager
    async def place(self, spec_hash: str, quota: Quota, until_s: float) -> AsyncIterator[None]:
        """Within this a call is one of those that may run at a time.

        Raises:
            Refused: no place became free until `until_s`, in the loop's time.
        """
        if quota.concurrency is None:
            yield
            return
        if (places := self._places.recall(spec_hash)) is None:
            places = asyncio.Semaphore(quota.concurrency)
            self._places.remember(spec_hash, places)
        try:
            async with asyncio.timeout_at(until_s):
                await places.acquire()
        except TimeoutError:
            raise _over(f"{quota.concurrency} calls at a time (quota.concurrency)") from None
        try:
            yield
        finally:
            places.release()

    async def moment(self, spec_hash: str, quota: Quota, until_s: float) -> None:
        """Wait until the next attempt may begin.

        Raises:
            Refused: that is not before `until_s`, in the loop's time.
        """
        if quota.per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        at_s = max(now_s, self._next_s.get(spec_hash, 0.0))
        if at_s >= until_s:
            raise _over(f"{quota.per_s:g} calls a second (quota.per_s)")
        self._next_s.remember(spec_hash, at_s + 1 / quota.per_s)
        await asyncio.sleep(at_s - now_s)


def _over(what: str) -> Refused:
    why = f"the tool allows {what}, and the call's deadline came before its turn"
    return Refused(Failure(CODE, why, retryable=True))
