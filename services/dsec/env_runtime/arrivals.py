"""A session's way into a worker: from its placement to the lane that steps it.

It is opened, its start is told, and it joins its lane. One that cannot start ends; one that cannot
start now, because something is away or no seat is free, is handed back to be placed elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from time import monotonic_ns
from typing import Any

from dsec.env_runtime.announcer import Announcer
from dsec.env_runtime.end_queue import OnEnded
from dsec.env_runtime.ends import UNPUBLISHABLE, closing
from dsec.env_runtime.lane import Lane
from dsec.env_runtime.library import NotNow, StartFailed, Tail
from dsec.env_runtime.opening import Opener, Opening
from dsec.env_runtime.replies import Replies
from dsec.env_runtime.roster import Roster
from dsec.env_runtime.running import RunningSlot
from dsec.env_runtime.traces import asks_for_steps, started
from dsec.platform.bus import TooLarge
from dsec.platform.clock import nanoseconds, now_ns
from dsec.platform.log import LogUnavailable
from dsec.platform.telemetry import Telemetry, metrics
from dsec_contracts import SessionPlaced, keys

log = logging.getLogger(__name__)

LOAD_DEADLINE_S = 120.0
"""Importing a session's code takes this long at most."""
HAND_BACK_PAUSE_S = 2.0
REASON_CHARS_MAX = 200
"""Of why a session is handed back: the event takes a short text."""

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Arrivals:
    """Takes in the sessions that are placed on one worker."""

    def __init__(
        self,
        roster: Roster,
        opener: Opener,
        lanes: Mapping[str, Lane],
        replies: Replies,
        say: Announcer,
        running: RunningSlot,
        *,
        starts_in_flight_max: int,
        on_ended: OnEnded,
        spawn: Spawn,
        telemetry: Telemetry,
    ) -> None:
        """Prepare.

        Args:
            spawn: runs what hears other lanes' answers, beside the worker's own loops.
        """
        self._roster = roster
        self._opener = opener
        self._lanes = lanes
        self._replies = replies
        self._say = say
        self._running = running
        self._starts = asyncio.Semaphore(starts_in_flight_max)
        self._on_ended = on_ended
        self._spawn = spawn
        self._telemetry = telemetry
        self._start_latency = telemetry.histogram(metrics.SSAL)
        self.closed = False
        """The worker drains: nobody goes live any more."""

    async def take_in(self, event: SessionPlaced, tail: Tail) -> None:
        """Open a placed session's seat, and let it go live."""
        async with self._starts:
            placed, request = event.fact, event.circumstance.request
            index = self._roster.take_index()
            if index is None:
                await asyncio.sleep(HAND_BACK_PAUSE_S)  # or it would come back at once, to no seat
                await self._hand_back(event, None, "no seat is free")
                return
            start_ns = now_ns()
            self._running.assign(index, placed.session_id, LOAD_DEADLINE_S)
            try:
                opening = await self._opener.open(request, placed, index, tail)
            except (NotNow, LogUnavailable) as away:
                log.warning("session %s is handed back: %s", placed.session_id, away)
                started(self._telemetry, placed, start_ns, str(away))
                await asyncio.sleep(HAND_BACK_PAUSE_S)
                await self._hand_back(event, index, str(away))
                return
            except StartFailed as failed:
                started(self._telemetry, placed, start_ns, f"{failed.code}: {failed}")
                ended = closing(failed.code, str(failed), failed.recorded)
                await self._say.ended(placed, ended, keys.placed(placed.attempt))
                self._roster.close(placed.session_id, index)
                return
            started(self._telemetry, placed, start_ns, None)
            if not self.closed:
                await self._go_live(event, opening, tail)

    async def _hand_back(self, event: SessionPlaced, index: int | None, reason: str) -> None:
        await self._say.released(event.fact, 0, reason[:REASON_CHARS_MAX])
        self._roster.close(event.fact.session_id, index)

    async def _go_live(self, event: SessionPlaced, opening: Opening, tail: Tail) -> None:
        seat, placed = opening.seat, event.fact
        if opening.started is not None:
            try:
                await self._say.started(seat, opening)
                waited_ns = now_ns() - nanoseconds(keys.session_time(placed.session_id))
                self._start_latency(max(0, waited_ns) / 1e9)
            except TooLarge as error:
                opening.ended = closing(UNPUBLISHABLE, str(error), None)
        lane = self._lanes[placed.lane]
        if opening.resumed is not None:
            await self._say.resumed(placed, opening.resumed)
        for anchor in opening.anchors:
            await lane.anchors.publish(seat, anchor)
        if opening.ended is not None:
            await self._on_ended(seat, opening.ended)
            return
        seat.trace_steps = asks_for_steps(self._telemetry, seat.request)
        before = dict.fromkeys(opening.lanes_before)
        if placed.previous_lane is not None:
            before[placed.previous_lane] = None
        seat.hears.update(before)
        follows = [await self._replies.follow(one, lane, tail.sequence + 1) for one in before]
        self._roster.live(seat)
        seat.published_ns = monotonic_ns()
        pending = self._roster.early.joined(placed.session_id, opening.pending)
        lane.join(seat)
        for given in pending:
            lane.give(seat, given)
        for follow in follows:  # whoever hears a lane stops where nobody is there that was on it
            if follow is not None:
                self._spawn(follow)
        self._running.clear()
