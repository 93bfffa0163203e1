"""Whether a worker hears: a pull loop can be alive, and its heart beat, while it gets nothing.

Whoever sends cannot tell that from a slow session, so the worker looks itself: messages wait for a
consumer of its, and none has been delivered for a while. Then only a new process helps, and its
sessions are placed anew at once, long before anybody else would miss them.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from dsec.platform.bus import Bus, BusError, Consumer
from dsec.platform.bus.retry import AWAY
from dsec.platform.cancellation import cancelled

CHECK_PERIOD_S = 2.0
DEAF_LIMIT_S = 15.0


class Deaf(BusError):
    """Messages wait and none is delivered."""


@dataclass(slots=True)
class _Delivered:
    """Up to where a consumer had delivered, and since when that is so."""

    sequence: int
    since_s: float


class Hearing:
    """Watches the consumers of one worker."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._consumers: dict[Consumer, _Delivered | None] = {}

    def add(self, consumer: Consumer) -> None:
        """Watch one more."""
        self._consumers[consumer] = None

    def remove(self, consumer: Consumer) -> None:
        """Watch it no longer."""
        self._consumers.pop(consumer, None)

    async def watch(self) -> None:
        """Return never, but by raising.

        Raises:
            Deaf: a consumer delivers nothing of what waits for it.
        """
        loop = asyncio.get_running_loop()
        while not cancelled():
            await asyncio.sleep(CHECK_PERIOD_S)
            for consumer in list(self._consumers):
                if not self._bus.connected:
                    self._consumers[consumer] = None  # it starts anew
                    continue
                with contextlib.suppress(*AWAY):
                    await self._look(consumer, loop.time())

    async def _look(self, consumer: Consumer, now_s: float) -> None:
        state = await consumer.state()
        if consumer not in self._consumers:
            return
        before = self._consumers[consumer]
        if state.pending == 0 or before is None or before.sequence != state.delivered:
            self._consumers[consumer] = _Delivered(state.delivered, now_s)
        elif now_s - before.since_s >= DEAF_LIMIT_S:
            raise Deaf(
                f"{state.pending} messages wait for {consumer.name}, and none was delivered for "
                f"{DEAF_LIMIT_S:g} s"
            )
