"""Which blobs the log names.

Kinds of events that name blobs come and go, so nothing is asked about kinds: whatever looks like a
blob's name, anywhere in a row, names it. That keeps a blob too many, and never one too few. Of hot
rows only what may be a reference is looked at: it has few bytes, and rows with their observation in
them have none to spare.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import asyncpg

from dsec.platform.connections import AWAY
from dsec.platform.db import CONNECT_TIMEOUT_S, libpq_url
from dsec.platform.log import LogUnavailable

KEY_CHARS = 64
REFERENCE_BYTES_MIN, REFERENCE_BYTES_MAX = KEY_CHARS, 192
"""What `dsec.session.observations.reference` makes has 80 to 90."""
ROWS_FETCHED = 1000
STATEMENT_S_MAX = 3600.0
"""Of one fetch: the whole log is read, and finding the next name in it may take long."""

_HOT = "('session.stepped', 'reward.scored')"
_RUN = re.compile(rb"[0-9a-f]{%d,}" % KEY_CHARS)


def _texts(table: str) -> Iterator[str]:
    """Selects of bytes that may hold names."""
    for column in ("observation", "reset_observation", "extras"):
        yield (
            f"select {column} from {table} where length({column}) between"
            f" {REFERENCE_BYTES_MIN} and {REFERENCE_BYTES_MAX}"
        )
    yield f"select fact from {table} where kind not in {_HOT}"
    yield (
        f"select convert_to(circumstance::text, 'UTF8') from {table}"
        f" where kind not in {_HOT} and circumstance is not null"
    )


_NAMES = " union all ".join((*_texts("event_log"), *_texts("event_aside"),
                             "select body from event_parked"))  # fmt: skip


async def unnamed(database_url: str, keys: Iterable[str]) -> set[str]:
    """Those of some blobs that no row of the log names.

    Memory goes by `keys`, not by the log, which is read from end to end.

    Raises:
        LogUnavailable: the database is away.
    """
    left = {key.encode() for key in keys}
    try:
        connection = await asyncpg.connect(
            libpq_url(database_url), timeout=CONNECT_TIMEOUT_S, command_timeout=STATEMENT_S_MAX
        )
        try:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                async for (held,) in connection.cursor(_NAMES, prefetch=ROWS_FETCHED):
                    if not left:
                        break
                    left.difference_update(_names(held))
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)
    except AWAY as error:
        raise LogUnavailable(f"the log's database cannot be asked: {error}") from error
    return {key.decode() for key in left}


def _names(held: bytes) -> Iterator[bytes]:
    """Every name in some bytes; of a longer run each part that may be one."""
    for run in _RUN.findall(held):
        for at in range(len(run) - KEY_CHARS + 1):
            yield run[at : at + KEY_CHARS]
