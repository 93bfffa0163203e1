"""A lane: sessions of one worker that advance together, one step a tick.

A tick steps every session that is ready, publishes the steps in columns and waits for the answers.
There is at most one unacknowledged publish a lane; two lanes a worker hide the wait. A session
whose answer is late no longer holds up the others and joins a later tick.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from time import monotonic_ns

from dsec.env_runtime.anchors import Outbox
from dsec.env_runtime.calls import Calls
from dsec.env_runtime.end_queue import EndQueue, OnEnded
from dsec.env_runtime.ends import cut_short, uncallable, unpublishable
from dsec.env_runtime.large_observations import rows_of
from dsec.env_runtime.overdue import overdue
from dsec.env_runtime.packing import Row, heard
from dsec.env_runtime.results import Results
from dsec.env_runtime.running import RunningSlot
from dsec.env_runtime.seats import Seat
from dsec.env_runtime.stepper import Stepper
from dsec.env_runtime.tick import publish
from dsec.env_runtime.traces import LaneTraces
from dsec.platform.bus import BadMessage, Bus, Message
from dsec.platform.cancellation import cancelled
from dsec.platform.objects import ObjectStore
from dsec.platform.telemetry import OFF, Telemetry
from dsec.session.io import Ended, Input, Stepped
from dsec_contracts import UnknownEvent

log = logging.getLogger(__name__)


class Lane:
    """One lane. `run` steps it until it is cancelled, `take` gives it answers."""

    def __init__(
        self,
        name: str,
        worker: str,
        bus: Bus,
        running: RunningSlot,
        objects: ObjectStore | None,
        *,
        lane_wait_ms: float,
        reply_wait_s: float,
        tick_slice_ms: float,
        on_ended: OnEnded,
        telemetry: Telemetry = OFF,
    ) -> None:
        self.name = name
        self.seats: dict[bytes, Seat] = {}
        self._worker = worker
        self._bus = bus
        self._objects = objects
        self._lane_wait_s = lane_wait_ms / 1000
        self._reply_wait_ns = int(reply_wait_s * 1e9)
        self._ready: dict[bytes, Seat] = {}
        self._waiting: set[bytes] = set()
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._traces = LaneTraces(telemetry, name)
        self._tick = 0
        self._steps = 0
        self._ends = EndQueue(self.leave, on_ended)
        self._unanswered: list[tuple[Seat, Stepped]] = []
        self._calls = Calls(bus, name, worker)
        self._stepper = Stepper(running, tick_slice_ms, self._traces, self._calls, self._ends)
        self.anchors = Outbox(bus, objects, name, worker, self._wake.set)
        self.results = Results(objects, self._give_fetched, self._lose)
        self._stopping = False
        self._held = False
        self._busy = asyncio.Lock()
        """Held while outputs are made and published: what is released has none on its way."""

    @property
    def ticks(self) -> int:
        """Ticks that it has published, repetitions included."""
        return self._tick

    @property
    def steps(self) -> int:
        """Steps that its sessions took, each once."""
        return self._steps

    # -- membership ----------------------------------------------------------------------------

    def join(self, seat: Seat) -> None:
        """A session enters, live from now on."""
        seat.machine.on_anchor = partial(self.anchors.take, seat)
        self.seats[seat.raw_id] = seat
        if seat.machine.awaiting is None:
            self._ready[seat.raw_id] = seat
            self._wake.set()
        for turn in seat.turns_asked():
            # Nobody knows whether the attempt before this one got to publish them.
            self._calls.add(seat, turn, again=True)
            self._wake.set()

    def leave(self, seat: Seat) -> None:
        """A session is over or handed back."""
        self.seats.pop(seat.raw_id, None)
        self._ready.pop(seat.raw_id, None)
        self._answer(seat.raw_id)
        if seat.trace_steps:
            self._traces.answered(seat, "the session left before its answer came")

    def _answer(self, raw_id: bytes) -> None:
        self._waiting.discard(raw_id)
        if not self._waiting:
            self._answered.set()

    # -- stepping ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tick for ever."""
        while not cancelled():
            self._wake.clear()  # before it is looked at what there is, not after
            async with self._busy:
                ticked = False if self._stopping else await self._advance()
            if ticked:
                await self._await_answers()
            else:
                await self._wake.wait()

    async def _advance(self) -> bool:
        """Publish what is due, and one tick. False: nobody is ready."""
        if self._unanswered:
            unanswered, self._unanswered = self._unanswered, []
            await self._publish(unanswered, again=True)
        await self._publish_calls()
        await self._ends.publish()
        if not self._ready or self._held or self.anchors.full:
            return False
        ready, self._ready = self._ready, {}
        self._traces.begin()
        taken = await self._stepper.step(ready, self.seats, self._ready)
        await self._publish(taken, again=False)
        if self.anchors.fresh:
            self.anchors.release()
        await self._publish_calls()  # behind the steps: a call beside an action names its step
        await self._ends.publish()
        return True

    def hold(self, held: bool) -> None:
        """Take no steps while the stream is nearly full: what is left of it is for rewards, ends
        and fences, without which no session could ever be over."""
        if held != self._held:
            log.warning("lane %s %s", self.name, "waits: the stream is full" if held else "goes on")
            self._held = held
            self._wake.set()

    async def stop(self) -> list[Seat]:
        """Finish what is being published and step no more. Returns the sessions to hand back."""
        self._stopping = True
        async with self._busy:
            # What a session is handed back with, the next attempt finds in the log.
            await self.anchors.flushed()
            await self._ends.publish()
            seats = list(self.seats.values())
            for seat in seats:
                self.leave(seat)
        return seats

    async def _publish(self, taken: list[tuple[Seat, Stepped]], *, again: bool) -> None:
        if not taken:
            return
        self._tick += 1
        rows = await rows_of(taken, self._objects)
        if not again:
            # Before the publish: an answer may come before the acknowledgement.
            self._waiting = {s.raw_id for s, _ in taken if s.machine.awaiting is not None}
            self._answered.clear()
            self._steps += len(taken)
            self._traces.stepped(self._tick, taken)
        tick = self._traces.tick(self._tick)
        unfit = await publish(
            self._bus,
            rows,
            lane=self.name,
            worker=self._worker,
            tick=self._tick,
            traceparent=tick.traceparent() if tick is not None else None,
        )
        for row, message in unfit:
            self._end_unpublishable(row, message, again=again)
        published = monotonic_ns()
        for seat, _ in taken:
            seat.published_ns = published
        if tick is not None:
            self._traces.published(tick, taken, again=again)

    async def _publish_calls(self) -> None:
        """Publish what tools are called. What they answer holds up nobody but their session."""
        if self._calls:
            for seat, message in await self._calls.publish():
                if seat.machine.ended is not None:  # cancelled meanwhile
                    continue
                self._cut(seat, uncallable(seat, message))

    def _end_unpublishable(self, row: Row, message: str, *, again: bool) -> None:
        """End the one session whose step fits no message. The others go on."""
        sender, _ = row
        seat = self.seats.get(sender.session_id)
        if seat is None or again:  # what is published again did fit
            log.warning("lane %s: a step cannot be published again: %s", self.name, message)
            return
        # In place of another end that the session came to meanwhile: that counts this step.
        self._cut(seat, unpublishable(seat, message))

    async def _await_answers(self) -> None:
        if not self._waiting:
            return
        try:
            # Not `wait_for`, which may swallow a cancellation that comes with the answer.
            async with asyncio.timeout(self._lane_wait_s):
                await self._answered.wait()
        except TimeoutError:
            self._waiting = set()  # they join a later tick

    def repeat_unanswered(self) -> None:
        """Have the lane publish again, under the same keys, what nobody answered in time."""
        self._unanswered, turns = overdue(self.seats.values(), monotonic_ns(), self._reply_wait_ns)
        for seat, turn in turns:
            self._calls.add(seat, turn, again=True)
        if self._unanswered or turns:
            log.warning(
                "lane %s: %d steps and %d tool turns unanswered, publishing again",
                self.name,
                len(self._unanswered),
                len(turns),
            )
            self._wake.set()

    # -- hearing -------------------------------------------------------------------------------

    def has_from(self, previous: str) -> bool:
        """Whether any of its sessions hears the answers that go to the lane `previous`."""
        return any(previous in seat.hears for seat in self.seats.values())

    def take(self, message: Message) -> None:
        """One answer."""
        try:
            event = message.event()
        except (BadMessage, UnknownEvent) as error:
            log.warning("lane %s: %s is ignored: %s", self.name, message.subject, error)
            return
        for raw_id, given in heard(event):
            seat = self.seats.get(raw_id)
            if seat is not None and (now := self.results.holds(raw_id, given)) is not None:
                self._give(seat, now)
        self._stepper.rest()
        self._signal()

    def _give_fetched(self, raw_id: bytes, given: Input) -> None:
        if (seat := self.seats.get(raw_id)) is not None:
            self.give(seat, given)

    def _lose(self, raw_id: bytes, message: str) -> None:
        """End a session whose input is nowhere to be had."""
        seat = self.seats.get(raw_id)
        if seat is not None and seat.machine.ended is None:
            self._cut(seat, cut_short(seat, "blob_not_found", message))
            self._signal()

    def _cut(self, seat: Seat, ended: Ended) -> None:
        self._ends.cut(seat, ended)
        self._waiting.discard(seat.raw_id)

    def give(self, seat: Seat, given: Input) -> None:
        """One input for one session."""
        self._give(seat, given)
        self._stepper.rest()
        self._signal()

    def _give(self, seat: Seat, given: Input) -> None:
        machine = seat.machine
        was_awaiting = machine.awaiting
        if machine.ended is not None:
            return
        ended = self._stepper.deliver(seat, given)
        if ended is not None:
            self._ends.add(seat, ended)
            self._waiting.discard(seat.raw_id)
        elif was_awaiting is not None and machine.awaiting is None:
            self._ready[seat.raw_id] = seat
            self._waiting.discard(seat.raw_id)
        elif machine.awaiting is not None and machine.awaiting < 0:
            self._waiting.discard(seat.raw_id)  # what is slow holds up its session alone
        if seat.trace_steps and (ended is not None or machine.awaiting is None):
            self._traces.answered(seat)

    def _signal(self) -> None:
        """Say what was heard: there is something to do, and perhaps nothing to wait for."""
        if self._ready or self._ends:
            self._wake.set()
        if not self._waiting:
            self._answered.set()
