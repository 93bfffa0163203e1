"""Places that several processes share: so many of something at a time, whichever has them.

A holder writes itself into one value of a bucket, by compare-and-set, and out of it again. What
died without doing so holds its place until its lease runs out; who lives renews. Times are Unix
seconds of the replicas' clocks, which may differ by less than a lease.

While the bus is away for longer than a lease, whoever has a place keeps it and others may take it
too: work under way is not stopped for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from typing import Final

from dsec.platform.bus import Bucket, BusUnavailable
from dsec.platform.cancellation import cancelled

log = logging.getLogger(__name__)

LEASE_S: Final = 15.0
RENEW_S: Final = 4.0
LOOK_S_MIN: Final = 0.02
LOOK_S_MAX: Final = 0.5
"""Whoever waits for a place looks again after a pause between these, the longer the longer."""
CONFLICT_S_MAX: Final = 0.02

Held = dict[str, float]
"""Until when each place is held, by its holder's name."""


def read_held(value: bytes) -> Held:
    """The holders from the bucket; empty, or none that can be read: nobody holds a place."""
    if not value:
        return {}
    try:
        held = {str(name): float(until) for name, until in json.loads(value).items()}
        if not all(map(math.isfinite, held.values())):
            raise ValueError("no instant")
    except (ValueError, TypeError, AttributeError) as error:
        log.error("what stands for places is none, and is not kept: %r (%s)", value[:80], error)
        return {}
    return held


def living(held: Held, now: float) -> Held:
    """Those whose leases have not run out. One that is further ahead than a lease can be was
    written by a clock that is wrong, and counts as one that begins now."""
    return {name: min(until, now + LEASE_S) for name, until in held.items() if until > now}


class Places:
    """Those of one thing, for one replica."""

    def __init__(
        self, bucket: Bucket, name: str, replica: str, most: int, clock: Callable[[], float]
    ) -> None:
        """Prepare.

        Args:
            name: of what has the places.
            clock: Unix seconds.
        """
        self._bucket = bucket
        self._key = f"{name}.places"
        self._replica = replica
        self._most = most
        self._clock = clock
        self._chance = random.SystemRandom()
        self._count = 0
        self._mine: set[str] = set()
        self._first = asyncio.Lock()
        """Of those who wait in this replica one looks at a time."""
        self._changing = asyncio.Lock()
        self._renewal: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def place(self, until_s: float) -> AsyncIterator[None]:
        """Within this a place is held.

        Raises:
            TimeoutError: none was free until `until_s`, in the loop's time.
        """
        self._count += 1
        holder = f"{self._replica}.{self._count}"
        try:
            async with asyncio.timeout_at(until_s), self._first:
                await self._take(holder)
            yield
        finally:
            await self._leave(holder)

    def close(self) -> None:
        """Renew no more."""
        if self._renewal is not None:
            self._renewal.cancel()

    async def _take(self, holder: str) -> None:
        pause_s = LOOK_S_MIN
        while not await self._changed(holder):
            await asyncio.sleep(self._chance.uniform(LOOK_S_MIN, pause_s))
            pause_s = min(2 * pause_s, LOOK_S_MAX)
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())

    async def _leave(self, holder: str) -> None:
        if holder in self._mine:
            self._mine.discard(holder)
            # A task of its own: whoever was stopped gives its place back all the same.
            await asyncio.shield(asyncio.create_task(self._changed()))

    async def _changed(self, wanted: str | None = None) -> bool:
        """Write which places are ours now, with one more if it is free. False: it was not, or the
        bus is away: then leases run out."""
        async with self._changing:
            while not cancelled():
                try:
                    value, revision = await self._bucket.get(self._key)
                    now = self._clock()
                    held = living(read_held(value), now)
                    others = {n: t for n, t in held.items() if not self._is_ours(n)}
                    ours = self._mine | ({wanted} if wanted is not None else set())
                    if wanted is not None and len(others) + len(ours) > self._most:
                        return False
                    told = json.dumps(others | dict.fromkeys(sorted(ours), now + LEASE_S)).encode()
                    if wanted is not None:
                        self._mine.add(wanted)  # before: should we be stopped here, it is left
                    if await self._bucket.change(self._key, told, revision) is not None:
                        return True
                    self._mine.discard(wanted or "")
                except BusUnavailable as error:
                    self._mine.discard(wanted or "")
                    log.warning("places cannot be asked for: %s", error)
                    return False
                await asyncio.sleep(self._chance.uniform(0, CONFLICT_S_MAX))
        raise asyncio.CancelledError

    def _is_ours(self, name: str) -> bool:
        return name.rpartition(".")[0] == self._replica

    async def _renew(self) -> None:
        while self._mine and not cancelled():
            await asyncio.sleep(RENEW_S)
            if self._mine:
                await self._changed()
