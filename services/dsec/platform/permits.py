"""Instants at which this replica may use what has a budget: from the shared ledger, in batches.

Whoever has a request waits here for its turn. One task at a time reserves for all who wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections import deque
from collections.abc import Callable

from dsec.platform.budget import Ledger, close, is_usable, reserve
from dsec.platform.bus import Bucket, BusUnavailable, Later
from dsec.platform.cancellation import cancelled

log = logging.getLogger(__name__)

WAIT_S_MAX = 1.0
"""How long a replica sleeps before it looks at the ledger again: the budget may have changed."""
AWAY_S = 0.5
CONFLICT_S_MAX = 0.02
STOPS = "this replica stops: another one asks"


def key_of(name: str) -> str:
    """Where the budget of a service, or of a tool, lies."""
    return f"{name}.budget"


def read_ledger(value: bytes) -> Ledger:
    """A budget from the bucket; empty, or no budget: nobody has used it yet."""
    if not value:
        return Ledger()
    try:
        next_at, closed_until = map(float, json.loads(value)[:2])
        if not math.isfinite(next_at + closed_until):
            raise ValueError("no instant")
    except (ValueError, TypeError, KeyError) as error:  # whoever waits for it would wait for ever
        log.error("what stands for a budget is none, and is not kept: %r (%s)", value[:80], error)
        return Ledger()
    return Ledger(next_at, closed_until)


class Permits:
    """Those of one budget, for one replica."""

    def __init__(self, bucket: Bucket, name: str, clock: Callable[[], float]) -> None:
        """Prepare.

        Args:
            name: of what has the budget.
            clock: Unix seconds.
        """
        self._bucket = bucket
        self._key = key_of(name)
        self._clock = clock
        self._chance = random.SystemRandom()
        self._waiters: deque[asyncio.Future[float]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._stopped = False
        self.qps_budget = 1.0

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._waiters)

    async def take(self) -> None:
        """Wait until one request may be sent: now.

        Raises:
            Later: this replica stops.
        """
        late = False
        while not cancelled():
            if self._stopped:
                raise Later(0.0, STOPS)
            turn: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            if late:
                self._waiters.appendleft(turn)
            else:
                self._waiters.append(turn)
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._reserve())
            instant = await turn
            await asyncio.sleep(max(0.0, instant - self._clock()))
            if is_usable(instant, self._clock()):
                return
            late = True  # this process was held up; what it could not use is gone
        raise asyncio.CancelledError

    async def leave_alone(self, for_s: float) -> None:
        """The service asked for it: nobody sends anything for so long."""
        while not cancelled():
            ledger, revision = await self._ledger()
            if await self._write(close(ledger, self._clock(), for_s), revision):
                return
            await asyncio.sleep(self._chance.uniform(0, CONFLICT_S_MAX))

    def stop(self) -> None:
        """Let nobody send anything more; who waits is told `Later`."""
        self._stopped = True
        while self._wanted():
            self._waiters.popleft().set_exception(Later(0.0, STOPS))

    def close(self) -> None:
        """Reserve no more."""
        if self._pump is not None:
            self._pump.cancel()

    async def _reserve(self) -> None:
        while self._wanted() and not cancelled():
            try:
                await self._reserve_some()
            except BusUnavailable as error:
                # What was reserved may have been written down: then it is wasted, and no more.
                log.warning("the budget cannot be asked for: %s", error)
                await asyncio.sleep(AWAY_S)

    async def _reserve_some(self) -> None:
        ledger, revision = await self._ledger()
        grant = reserve(ledger, self._clock(), self.qps_budget, self._wanted())
        if not grant.instants:
            await asyncio.sleep(min(grant.wait_s, WAIT_S_MAX))
            return
        if not await self._write(grant.ledger, revision):
            await asyncio.sleep(self._chance.uniform(0, CONFLICT_S_MAX))
            return
        for instant in grant.instants:
            if self._wanted():
                self._waiters.popleft().set_result(instant)

    def _wanted(self) -> int:
        while self._waiters and self._waiters[0].done():  # whoever waited has been cancelled
            self._waiters.popleft()
        return len(self._waiters)

    async def _ledger(self) -> tuple[Ledger, int]:
        entry = await self._bucket.get(self._key)
        return read_ledger(entry.value), entry.revision

    async def _write(self, ledger: Ledger, revision: int) -> bool:
        value = json.dumps([ledger.next_at, ledger.closed_until]).encode()
        return await self._bucket.change(self._key, value, revision) is not None
