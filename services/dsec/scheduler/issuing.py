"""Intents on their way out: each is noted in the state, and published beside the loops.

Until the stream has shown what became of an intent it is in flight, and nobody decides it again.
One that was withdrawn, because somebody else was faster, is due again once the state has what that
somebody did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from dsec.scheduler.effects import Effects, Withdrawn
from dsec.scheduler.in_flight import issued, withdrawn
from dsec.scheduler.intents import End, Intent, Reject
from dsec.scheduler.state import SchedulerState

log = logging.getLogger(__name__)

PUBLISHES_IN_FLIGHT_MAX = 128
ENDS_IN_FLIGHT_MAX = 16

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Issuing:
    """Carries intents out."""

    def __init__(
        self, state: SchedulerState, effects: Effects, spawn: Spawn, position: Callable[[], int]
    ) -> None:
        """Prepare.

        Args:
            position: gives how far in the stream the state is.
        """
        self._state = state
        self._effects = effects
        self._spawn = spawn
        self._position = position
        self._publishing = asyncio.Semaphore(PUBLISHES_IN_FLIGHT_MAX)
        self._ending = asyncio.Semaphore(ENDS_IN_FLIGHT_MAX)
        self._refused: list[tuple[int, Intent]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        """Those that carry out what was issued."""

    def issue(self, intents: list[Intent]) -> None:
        """Carry intents out, beside whatever else is done."""
        for intent in intents:
            issued(self._state, intent)
            task = self._spawn(self._carry_out(intent))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def rejections(self, intents: list[Intent]) -> list[Reject]:
        """The rejections among intents, noted; whoever asks for them has them published."""
        rejections = [intent for intent in intents if isinstance(intent, Reject)]
        for rejection in rejections:
            issued(self._state, rejection)
        return rejections

    async def reject(self, rejections: list[Reject]) -> None:
        """Publish rejections. They have no state of their own in the log: what they reject is
        acknowledged afterwards."""
        await asyncio.gather(*(self._effects.carry_out(one) for one in rejections))

    def settle_refused(self) -> None:
        """Placements that were refused are due again once the stream has shown us why."""
        waiting = self._refused
        self._refused = []
        for sequence, intent in waiting:
            if sequence <= self._position():
                withdrawn(self._state, intent, sequence)
            else:
                self._refused.append((sequence, intent))

    async def _carry_out(self, intent: Intent) -> None:
        async with self._ending if isinstance(intent, End) else self._publishing:
            outcome = await self._effects.carry_out(intent)
        match outcome:
            case Withdrawn(None):
                withdrawn(self._state, intent)
            case Withdrawn(int(sequence)):
                log.info("somebody placed a session before us, at %d", sequence)
                self._refused.append((sequence, intent))
                self.settle_refused()
