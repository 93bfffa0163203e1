"""A worker: one process, many sessions. It is started and watched by its node's supervisor.

It takes the placements that name it, opens a seat for each, and lets its lanes step them. All its
publishes carry its fence: once the scheduler has given it up, they are refused, and it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Coroutine, Generator
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any
from uuid import UUID

from dsec.env_runtime.announcer import Announcer
from dsec.env_runtime.heap import Heap
from dsec.env_runtime.hearing import Hearing
from dsec.env_runtime.lane import Lane
from dsec.env_runtime.loading import Loaded, Search
from dsec.env_runtime.running import EXIT_FENCED, RunningSlot
from dsec.env_runtime.seats import (
    UNPUBLISHABLE,
    Library,
    NotNow,
    Opener,
    Opening,
    Seat,
    StartFailed,
    Tail,
    closing,
    open_seat,
)
from dsec.env_runtime.settings import EnvRuntimeSettings
from dsec.env_runtime.starts import watch_starts
from dsec.env_runtime.traces import asks_for_steps, started
from dsec.platform.bus import (
    Author,
    BadMessage,
    Bus,
    BusError,
    Consumer,
    Message,
    PublishRefused,
    TooLarge,
)
from dsec.platform.bus.retry import AWAY
from dsec.platform.cancellation import cancelled
from dsec.platform.clock import nanoseconds, now_ns, utc_now
from dsec.platform.log import LogReader, LogUnavailable
from dsec.platform.objects import ObjectStore
from dsec.platform.telemetry import OFF, Telemetry, connect, metrics
from dsec.session.anchor_restore import NotRestorable
from dsec.session.io import Ended, Input, cancel_input, curriculum_input
from dsec.session.log_row import RecordedGap
from dsec.session.rerun import Recorded
from dsec_contracts import (
    CurriculumChanged,
    SessionCancelRequested,
    SessionPlaced,
    UnknownEvent,
    WorkerHeartbeat,
    keys,
)
from dsec_contracts.worker import HeartbeatCircumstance, HeartbeatFact

log = logging.getLogger(__name__)

LOAD_DEADLINE_S = 120.0
"""Importing a session's code takes this long at most."""
HAND_BACK_PAUSE_S = 2.0
PLACEMENTS_AT_ONCE = 256
PLACEMENTS_WAIT_S = 5.0
CANCELS_REMEMBERED_MAX = 10_000
CHANGES_REMEMBERED_MAX = 10_000
"""Changes of a curriculum level, of sessions that are not here, or not yet."""
HEARTBEAT_SESSIONS_MAX = 2_000
CONSUMER_INACTIVE_S = 120.0
STREAM_FULL_SHARE = 0.9
"""Of the bytes that the stream may have: beyond that no more steps are taken."""
STREAM_WATCH_S = 1.0
PLACEMENT_FILTERS = [
    "dsec.session.placed.*",
    "dsec.session.cancel_requested.*",
    "dsec.curriculum.changed.*",
]
REPLY_FILTERS = (
    "dsec.reward.scored",
    "dsec.reward.missing",
    "dsec.reward.deferred",
    "dsec.tool.returned",
    "dsec.tool.failed",
)


class _Drained(Exception):
    """Everything was handed back; ends the task group."""


class Worker:
    """One worker process."""

    def __init__(
        self,
        name: str,
        settings: EnvRuntimeSettings,
        bus: Bus,
        reader: LogReader,
        objects: ObjectStore | None,
        running: RunningSlot,
        *,
        isolated: bool,
        telemetry: Telemetry = OFF,
    ) -> None:
        self.name = name
        self._telemetry = telemetry
        self._settings = settings
        self._bus = bus
        self._author = Author(bus, f"dsec/env-runtime/{name}", utc_now, fence=name)
        self._say = Announcer(self._author, name, objects)
        self._running = running
        self._objects = objects
        self._isolated = isolated
        self._opener = Opener(Library(reader, objects, running), reader, settings.restart_wait_s)
        self._lanes = {
            lane: self._lane(lane)
            for lane in (f"{name}-{n}" for n in range(settings.lanes_per_worker))
        }
        self._free = list(range(settings.sessions_per_worker_max - 1, -1, -1))
        self._seats: dict[UUID, Seat] = {}
        self.heap = Heap()
        self._opening: dict[UUID, SessionPlaced] = {}
        self._cancels: OrderedDict[UUID, Input] = OrderedDict()
        self._changes: OrderedDict[UUID, Input] = OrderedDict()
        self._hearing = Hearing(bus)
        self._followed: set[tuple[str, str]] = set()
        self._follows = 0
        self._slices = asyncio.Lock()
        """Held by whoever re-executes, for a slice of time and as long a pause."""
        self._starts = asyncio.Semaphore(settings.starts_in_flight_max)
        self._group: asyncio.TaskGroup
        self._draining = False
        self._beats = 0
        self._placements_read = 0
        self._anchors_loaded = self._anchors_missed = 0
        self._tell(telemetry)

    def _tell(self, telemetry: Telemetry) -> None:
        lanes = self._lanes.values()
        telemetry.counter(metrics.TICKS, lambda: sum(lane.ticks for lane in lanes))
        telemetry.counter(metrics.STEPS, lambda: sum(lane.steps for lane in lanes))
        telemetry.counter(metrics.ANCHORS_LOADED, lambda: self._anchors_loaded)
        telemetry.counter(metrics.ANCHORS_MISSED, lambda: self._anchors_missed)
        telemetry.gauge(metrics.SESSIONS_HOSTED, lambda: len(self._seats))
        self._start_latency = telemetry.histogram(metrics.SSAL)

    def _lane(self, name: str) -> Lane:
        s = self._settings
        return Lane(
            name,
            self.name,
            self._bus,
            self._running,
            self._objects,
            lane_wait_ms=s.lane_wait_ms,
            reply_wait_s=s.reply_wait_s,
            tick_slice_ms=s.tick_slice_ms,
            on_ended=self._on_ended,
            telemetry=self._telemetry,
        )

    # -- running -------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then hand live sessions back.

        Raises:
            PublishRefused: the worker was fenced.
        """
        start = (await self._bus.stream_state()).last_sequence + 1
        self._placements_read = start - 1
        placements = await self._bus.consumer(
            f"worker-{self.name}",
            PLACEMENT_FILTERS,
            start_sequence=start,
            inactive_s=CONSUMER_INACTIVE_S,
        )
        self._hearing.add(placements)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for lane in self._lanes.values():
                    consumer = await self._replies(f"lane-{lane.name}", lane.name, start)
                    self._spawn(self._hear(lane, consumer, lane.name, start - 1))
                    self._spawn(lane.run())
                    self._spawn(lane.anchors.run())
                    self._spawn(lane.results.run())
                self._spawn(self._take_placements(placements))
                self._spawn(self._heartbeat())
                self._spawn(self._repeat_unanswered())
                self._spawn(self._watch_stream())
                self._spawn(self._hearing.watch())
                await stop.wait()
                await self._drain()
                raise _Drained
        except* _Drained:
            pass
        except* PublishRefused as refused:
            raise refused.exceptions[0] from None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._group.create_task(work)

    async def _replies(self, name: str, lane: str, start_sequence: int) -> Consumer:
        """The answers that go to a lane."""
        consumer = await self._bus.consumer(
            name,
            [f"{kind}.{lane}" for kind in REPLY_FILTERS],
            start_sequence=start_sequence,
            ack="none",
            inactive_s=CONSUMER_INACTIVE_S,
        )
        self._hearing.add(consumer)
        return consumer

    async def _follow(
        self, previous: str, lane: Lane, start_sequence: int
    ) -> Coroutine[Any, Any, None] | None:
        """What hears the answers that go to `previous` too, while `lane` has sessions from there.
        None: that is done already."""
        if (previous, lane.name) in self._followed:
            return None
        self._followed.add((previous, lane.name))
        self._follows += 1  # a name of its own: the one before may be on its way out
        name = f"lane-{previous}-for-{lane.name}-{self._follows}"
        consumer = await self._replies(name, previous, start_sequence)
        return self._hear(lane, consumer, previous, start_sequence - 1, previous)

    async def _hear(
        self, lane: Lane, consumer: Consumer, of: str, after: int, previous: str | None = None
    ) -> None:
        """Have a lane hear the answers that go to the lane `of`, all of them and in order.

        What gets lost on the way is not delivered again, and asking again may bring another answer
        than the one that counts, so from there on all are read anew.
        """
        while (lost_after := await lane.hear(consumer, previous, after)) is not None:
            after = lost_after
            log.warning("answers to %s behind %d are lost on the way: read again", of, after)
            await self._forget(consumer)
            self._follows += 1
            name = f"lane-{of}-for-{lane.name}-{self._follows}"
            consumer = await self._replies(name, of, after + 1)
        if previous is not None:
            # Before anything else may happen: who comes now has to follow that lane anew.
            self._followed.discard((previous, lane.name))
            await self._forget(consumer)

    async def _forget(self, consumer: Consumer) -> None:
        self._hearing.remove(consumer)
        await consumer.close()
        with contextlib.suppress(*AWAY):  # then the server removes it once it is idle
            await self._bus.delete_consumer(consumer.name)

    async def _take_placements(self, consumer: Consumer) -> None:
        while not cancelled():
            for message in await consumer.fetch(PLACEMENTS_AT_ONCE, PLACEMENTS_WAIT_S):
                # Some come again, out of their turn.
                self._placements_read = max(self._placements_read, message.sequence)
                try:
                    event = message.event()
                except (BadMessage, UnknownEvent) as error:
                    log.warning("%s is ignored: %s", message.subject, error)
                    await message.ack()
                    continue
                if isinstance(event, SessionPlaced) and event.fact.worker == self.name:
                    self._place(event, message)
                elif isinstance(event, SessionCancelRequested):
                    self._cancel(event)
                elif isinstance(event, CurriculumChanged):
                    self._change(event)
                await message.ack()  # after it was taken: both may come twice

    def _place(self, event: SessionPlaced, message: Message) -> None:
        session_id = event.fact.session_id
        if session_id in self._seats or session_id in self._opening:
            return
        self._opening[session_id] = event
        self._spawn(self._open(event, Tail(message.sequence, event.circumstance.epoch)))

    def _cancel(self, event: SessionCancelRequested) -> None:
        session_id, told = event.fact.session_id, event.circumstance
        given = cancel_input(told.code, told.reason or "")
        seat = self._seats.get(session_id)
        if seat is not None:
            self._lanes[seat.placed.lane].give(seat, given)
            self._running.clear()
            return
        # Not here, or not yet: a placement may be on its way.
        self._cancels[session_id] = given
        while len(self._cancels) > CANCELS_REMEMBERED_MAX:
            self._cancels.popitem(last=False)

    def _change(self, event: CurriculumChanged) -> None:
        fact = event.fact
        given = curriculum_input(fact.n, fact.level)
        seat = self._seats.get(fact.session_id)
        if seat is not None:
            seat.machine.deliver(given)  # runs no user code: it waits there for the next episode
            return
        # Not here, or not yet. Of several the last one counts, and some come again out of turn.
        known = self._changes.get(fact.session_id)
        if known is None or known.ordinal < given.ordinal:
            self._changes[fact.session_id] = given
        while len(self._changes) > CHANGES_REMEMBERED_MAX:
            self._changes.popitem(last=False)

    # -- seats ---------------------------------------------------------------------------------

    async def _open(self, event: SessionPlaced, tail: Tail) -> None:
        async with self._starts:
            placed = event.fact
            if not self._free:
                await asyncio.sleep(HAND_BACK_PAUSE_S)  # or it would come back at once, to no seat
                await self._hand_back(event, None, "no seat is free")
                return
            start_ns = now_ns()
            index = self._free.pop()
            self._running.assign(index, placed.session_id, LOAD_DEADLINE_S)
            try:
                opening = await self._opened(event, index, tail)
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
                self._close(placed.session_id, index)
                return
            started(self._telemetry, placed, start_ns, None)
            if not self._draining:
                await self._go_live(event, opening, tail)

    async def _opened(self, event: SessionPlaced, index: int, tail: Tail) -> Opening:
        placed, request = event.fact, event.circumstance.request
        recorded = await self._opener.recorded(placed, tail)
        try:
            seat = await self._opener.prepare(request, placed, index, tail)
        except StartFailed as failed:
            failed.recorded = recorded
            raise

        self._running.assign(index, placed.session_id, seat.step_deadline_s)
        try:
            if recorded is None or not recorded.anchors:
                return await self._executed(open_seat(seat, recorded), index)
            return await self._opened_from_anchor(seat, recorded, index)
        except RecordedGap as gap:
            raise StartFailed("log_damaged", str(gap)) from gap

    async def _opened_from_anchor(self, seat: Seat, recorded: Recorded, index: int) -> Opening:
        """From the newest anchor that is of use, or from step 0."""
        search = Search(recorded, self._objects)
        opening = None
        while opening is None:
            opening = await self._opened_at(await search.next(), search, seat, index)
        return opening

    async def _opened_at(
        self, loaded: Loaded | None, search: Search, seat: Seat, index: int
    ) -> Opening | None:
        """From this anchor, or, without one, from step 0. None: the anchor is of no use."""
        try:
            opening = await self._executed(open_seat(seat, search.recorded, loaded), index)
        except NotRestorable as error:
            assert loaded is not None
            search.miss(loaded.anchor, "not_restorable", str(error))
            return None
        self._anchors_loaded += loaded is not None
        self._anchors_missed += len(search.misses)
        opening.resumed = search.resumed(self.name, loaded)
        return opening

    async def _executed(self, work: Generator[int, None, Opening], index: int) -> Opening:
        """What opening a seat comes to.

        The sessions that are live keep half of the time, however many others are re-executed.
        """
        step = next(work)
        while True:
            async with self._slices:
                began = monotonic_ns()
                try:
                    while (now := monotonic_ns()) - began < self._settings.tick_slice_ms * 1e6:
                        self._running.enter(index, step, now)
                        step = next(work)
                        self._running.end_if_forked()
                except StopIteration as done:
                    opening: Opening = done.value
                    return opening
                except MemoryError:
                    self._running.end_out_of_memory()
                finally:
                    self._running.clear()
                await asyncio.sleep((monotonic_ns() - began) / 1e9 if self._seats else 0)

    async def _hand_back(self, event: SessionPlaced, index: int | None, reason: str) -> None:
        await self._say.released(event.fact, 0, reason[:200])
        self._opening.pop(event.fact.session_id, None)
        if index is not None:
            self._close(event.fact.session_id, index)

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
        follows = [await self._follow(one, lane, tail.sequence + 1) for one in before]
        self._seats[placed.session_id] = seat
        self.heap.started()
        self._opening.pop(placed.session_id, None)
        seat.published_ns = monotonic_ns()
        pending = list(opening.pending)
        if (cancel := self._cancels.pop(placed.session_id, None)) is not None:
            pending.append(cancel)
        if (change := self._changes.pop(placed.session_id, None)) is not None:
            pending.insert(0, change)
        lane.join(seat)
        for given in pending:
            lane.give(seat, given)
        for follow in follows:  # whoever hears a lane stops where nobody is there that was on it
            if follow is not None:
                self._spawn(follow)
        self._running.clear()

    def _close(self, session_id: UUID, index: int) -> None:
        if self._seats.pop(session_id, None) is not None:
            self.heap.ended(len(self._seats))
        self._opening.pop(session_id, None)
        self._cancels.pop(session_id, None)
        self._changes.pop(session_id, None)
        self._free.append(index)

    async def _on_ended(self, seat: Seat, ended: Ended) -> None:
        placed = seat.placed
        cause = keys.step(seat.last.step) if seat.last else keys.placed(placed.attempt)
        if seat.lost_memory_before_step and not ended.message:
            ended = replace(
                ended,
                message="the agent is not re-executed (deterministic_mode: false): after a restart "
                "it went on without what its step() kept from before step "
                f"{seat.lost_memory_before_step}",
            )
        await self._say.ended(placed, ended, cause)
        self._running.enter(seat.index, ended.steps, monotonic_ns())
        try:
            seat.machine.close()
        except MemoryError:
            self._running.end_out_of_memory()
        self._running.clear()
        self._close(placed.session_id, seat.index)

    # -- the rest ------------------------------------------------------------------------------

    async def _repeat_unanswered(self) -> None:
        while not cancelled():
            await asyncio.sleep(self._settings.reply_wait_s / 4)
            for lane in self._lanes.values():
                lane.repeat_unanswered()

    async def _watch_stream(self) -> None:
        """Lanes stop before the stream is full, and go on once the recorder has trimmed it."""
        while not cancelled():
            with contextlib.suppress(*AWAY, BusError):  # asked again in a moment
                state = await self._bus.stream_state()
                full = 0 < state.max_bytes * STREAM_FULL_SHARE < state.bytes
                for lane in self._lanes.values():
                    lane.hold(full)
            await asyncio.sleep(STREAM_WATCH_S)

    async def _heartbeat(self) -> None:
        while not cancelled():
            await self.beat("ready")
            await asyncio.sleep(self._settings.heartbeat_period_s)

    async def beat(self, state: str) -> None:
        """One heartbeat."""
        self._beats += 1
        told = [
            (
                session_id,
                seat.placed.attempt,
                seat.machine.steps,
                seat.waiting_on,
                seat.reward_lag_steps,
            )
            for session_id, seat in self._seats.items()
        ]
        told += [
            (session_id, event.fact.attempt, 0, "start", 0)
            for session_id, event in self._opening.items()
        ]
        total, learns = len(told), any(seat.has_curriculum for seat in self._seats.values())
        if total > HEARTBEAT_SESSIONS_MAX:  # a window that moves on with every beat
            at = (self._beats * HEARTBEAT_SESSIONS_MAX) % total
            told = (told[at:] + told[:at])[:HEARTBEAT_SESSIONS_MAX]
        fact = HeartbeatFact(
            worker=self.name,
            node=self._settings.node,
            state="draining" if state == "draining" else "ready",
            lanes=list(self._lanes),
            capacity_sessions=1 if self._isolated else self._settings.sessions_per_worker_max,
            isolated=self._isolated,
        )
        circumstance = HeartbeatCircumstance(
            pid=os.getpid(),
            sessions=[session_id for session_id, *_ in told],
            attempts=[attempt for _, attempt, *_ in told],
            steps=[steps for _, _, steps, *_ in told],
            waiting_on=[waiting_on for *_, waiting_on, _ in told],
            reward_lag_steps=[lag for *_, lag in told] if learns else None,
            sessions_total=total,
            placements_read=self._placements_read,
        )
        await self._author.publish_transient(
            WorkerHeartbeat(fact=fact, circumstance=circumstance),
            self.name,
            f"{self.name}.beat.{self._beats}",
        )

    async def _drain(self) -> None:
        """Hand every live session back, as far as the time for it goes."""
        self._draining = True
        await self.beat("draining")

        async def release(lane: Lane) -> None:
            seats = await lane.stop()
            await asyncio.gather(
                *(self._say.released(seat.placed, seat.machine.steps, "drain") for seat in seats)
            )

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_wait_s):
                await asyncio.gather(*(release(lane) for lane in self._lanes.values()))


async def serve(name: str, slot: Path, *, isolated: bool, settings: EnvRuntimeSettings) -> int:
    """Run a worker until it is told to stop. Returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    running = RunningSlot(slot, settings.sessions_per_worker_max, create=False)
    watch_starts(running)
    bus = await Bus.connect(settings.nats_url, name)
    reader = await LogReader.connect(settings.database_url)
    url, credentials = settings.object_store_url, settings.object_store_credentials
    objects = ObjectStore(url, credentials) if url else None
    telemetry = connect(settings, "env-runtime", name)
    worker = Worker(
        name, settings, bus, reader, objects, running, isolated=isolated, telemetry=telemetry
    )
    worker.heap.begin()
    try:
        await worker.run(stop)
    except PublishRefused as refused:
        log.warning("fenced, leaving: %s", refused)
        return EXIT_FENCED
    finally:
        telemetry.close()
    await bus.close()
    await reader.close()
    return 0
