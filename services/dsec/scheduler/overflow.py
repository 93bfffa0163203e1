"""Requests that wait in the log: more came than memory has room for, so from one on they are left
there, and taken in their order as sessions are placed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from dsec.platform.log import Position
from dsec.scheduler.admission import Ask, Prior
from dsec.scheduler.decider import Limits, admit, decide
from dsec.scheduler.history import History, flat
from dsec.scheduler.issuing import Issuing
from dsec.scheduler.recovery import LOG_AWAY
from dsec.scheduler.state import SchedulerState

log = logging.getLogger(__name__)

REFILL_REQUESTS_MAX = 500


def known(floor: Position, reached: Position) -> Position:
    """How far the log may be read. It may be ahead of us, and of what follows our state we do not
    know yet what it builds on, such as the specs that were registered just before."""
    return min(floor, reached)


class Overflow:
    """What of the requests waits in the log."""

    def __init__(
        self,
        history: History,
        state: SchedulerState,
        issuing: Issuing,
        *,
        start: Position | None,
        queued_max: int,
        limits: Limits,
        now: Callable[[], datetime],
        on_taken: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            start: of the first request that waits in the log; None: all that came are in memory.
            on_taken: called when requests were taken from the log.
        """
        self._history = history
        self._state = state
        self._issuing = issuing
        self._start = start
        self._queued_max = queued_max
        self._limits = limits
        self._now = now
        self._on_taken = on_taken

    def has_room(self, at: Position) -> bool:
        """Whether memory has room for the request at a position. If not, it waits in the log, and
        so do all that come after it."""
        if self._start is None and self._state.queued >= self._queued_max:
            log.warning("%d sessions wait: later requests wait in the log", self._state.queued)
            self._start = at
        return self._start is None

    async def refill(self, reached: Callable[[], Position]) -> bool:
        """Take as many as there is room for. True: there may be more at once.

        Args:
            reached: gives how far the state is.
        """
        room = min(self._queued_max - self._state.queued, REFILL_REQUESTS_MAX)
        if self._start is None or room <= 0:
            return False
        try:
            return await self._refill(self._start, room, reached)
        except LOG_AWAY as error:
            log.warning("requests that wait in the log cannot be read yet: %s", error)
            return False

    async def _refill(self, start: Position, room: int, reached: Callable[[], Position]) -> bool:
        row = await self._history.floor()
        if row is None:
            return False
        upto = known(row.floor, reached())
        found = await self._history.waiting(start, upto, room)
        for one in found:
            command = Ask(one.event_id, one.request, Prior(None, False, one.cancel))
            sequence = flat(one.at, reached().epoch)
            intents = decide(self._state, command, self._now(), self._limits)
            rejections = self._issuing.rejections(intents)
            await self._issuing.reject(rejections)
            if not rejections and admit(self._state, command, sequence):
                self._issuing.issue(intents)
        self._on_taken()
        if len(found) == room:
            last = found[-1].at
            self._start = Position(last.epoch, last.sequence + 1)
        elif upto >= reached():
            self._start = None  # the log has no more, and neither has the stream
        else:
            self._start = Position(upto.epoch, upto.sequence + 1)
        return len(found) == room
