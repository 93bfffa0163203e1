"""Collecting what an object store has and no row of the log names: blobs whose event was never
published, and those of sessions that retention dropped.

In this order, so that nothing is removed that somebody is about to name: the store is listed, and
only what is old counts; the log comes to where the stream is now; the log says what it names; and
what is left is removed unless somebody put it again meanwhile, which makes it young.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsec.client.client import Client
from dsec.client.endpoints import ClientError
from dsec.platform.log_blobs import unnamed
from dsec.platform.object_listing import Listed
from dsec.platform.objects import ObjectStore

FLOOR_WAIT_S_MAX = 30.0
DELETES_IN_FLIGHT_MAX = 8


@dataclass(frozen=True, slots=True)
class Collected:
    """What a store had that was older than asked for.

    `named`: how many of them the log names; they stay. `orphans` are blobs, `left` drafts and
    proofs; of both, `removed` are gone now, with `removed_bytes`.
    """

    place: str
    older: int
    named: int
    orphans: int
    left: int
    orphan_bytes: int
    removed: int
    removed_bytes: int


async def collect(
    client: Client,
    before_s: float,
    *,
    dry_run: bool = False,
    force: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Remove what was written before a time (seconds since 1970) and is named nowhere.

    Args:
        dry_run: look, and remove nothing.
        force: although the log names none of the store's blobs.
        on_progress: is told how many were looked at, and of how many.

    Raises:
        ClientError: the log names none, which a log of another store would not either.
        LogBehind: the log lacks events that the stream has.
        LogUnavailable, ObjectStoreError, BusError: something is away; run it again.
    """
    store = client.objects()
    found = await asyncio.to_thread(store.older, before_s)
    blobs = {one.key: one for one in found if one.key is not None}
    left = [one for one in found if one.is_left]
    bus, log = await client.bus(), await client.log()
    await log.wait_floor((await bus.stream_state()).last_sequence, FLOOR_WAIT_S_MAX)
    keys = await unnamed(client.database_url, blobs) if blobs else set()
    if blobs and len(keys) == len(blobs) and not (force or dry_run):
        raise ClientError(
            f"the log names none of the {len(blobs)} blobs in {store.place}: is this the log of "
            "another store? Look with --dry-run; --force removes them all"
        )
    orphans = [blobs[key] for key in sorted(keys)]
    removed = [] if dry_run else await _remove(store, [*orphans, *left], before_s, on_progress)
    return Collected(
        store.place,
        len(found),
        len(blobs) - len(keys),
        len(orphans),
        len(left),
        sum(one.size_bytes for one in orphans),
        len(removed),
        sum(one.size_bytes for one in removed),
    )


async def _remove(
    store: ObjectStore,
    found: Sequence[Listed],
    before_s: float,
    on_progress: Callable[[int, int], None] | None,
) -> list[Listed]:
    removed = []
    for at in range(0, len(found), DELETES_IN_FLIGHT_MAX):
        batch = found[at : at + DELETES_IN_FLIGHT_MAX]
        works = (asyncio.to_thread(store.collect, one, before_s) for one in batch)
        gone = await asyncio.gather(*works)
        removed += [one for one, is_gone in zip(batch, gone, strict=True) if is_gone]
        if on_progress is not None:
            on_progress(at + len(batch), len(found))
    return removed
