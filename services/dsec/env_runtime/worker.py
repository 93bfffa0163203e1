"""A worker: one process, many sessions. It is started and watched by its node's supervisor.

It takes the placements that name it, opens a seat for each, and lets its lanes step them. All its
publishes carry its fence: once the scheduler has given it up, they are refused, and it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

from dsec.env_runtime.announcer import Announcer
from dsec.env_runtime.arrivals import Arrivals
from dsec.env_runtime.hearing import Hearing
from dsec.env_runtime.heartbeats import Heartbeats
from dsec.env_runtime.lane import Lane
from dsec.env_runtime.library import Library, Tail
from dsec.env_runtime.memory import resident_bytes
from dsec.env_runtime.opening import Opener
from dsec.env_runtime.replies import CONSUMER_INACTIVE_S, Replies
from dsec.env_runtime.roster import Roster
from dsec.env_runtime.running import EXIT_FENCED, RunningSlot
from dsec.env_runtime.seats import Seat
from dsec.env_runtime.settings import EnvRuntimeSettings
from dsec.env_runtime.slices import Slices
from dsec.env_runtime.starts import watch_starts
from dsec.platform.bus import (
    Author,
    BadMessage,
    Bus,
    BusError,
    Consumer,
    Message,
    PublishRefused,
)
from dsec.platform.bus.retry import AWAY
from dsec.platform.cancellation import cancelled
from dsec.platform.clock import utc_now
from dsec.platform.log import LogReader
from dsec.platform.objects import ObjectStore
from dsec.platform.telemetry import OFF, Telemetry, connect, metrics
from dsec.session.io import Ended, cancel_input, curriculum_input
from dsec_contracts import (
    CurriculumChanged,
    SessionCancelRequested,
    SessionPlaced,
    UnknownEvent,
    keys,
    subjects,
)

log = logging.getLogger(__name__)

PLACEMENTS_AT_ONCE = 256
PLACEMENTS_WAIT_S = 5.0
STREAM_FULL_SHARE = 0.9
"""Of the bytes that the stream may have: beyond that no more steps are taken."""
STREAM_WATCH_S = 1.0
PLACEMENT_FILTERS = [
    subjects.every(event.event_name())
    for event in (SessionPlaced, SessionCancelRequested, CurriculumChanged)
]


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
        self.roster = Roster(settings.sessions_per_worker_max)
        self._lanes = {
            lane: self._lane(lane)
            for lane in (f"{name}-{n}" for n in range(settings.lanes_per_worker))
        }
        self._hearing = Hearing(bus)
        self.replies = Replies(bus, self._hearing)
        opener = Opener(
            name,
            Library(reader, objects, running),
            reader,
            objects,
            running,
            Slices(running, settings.tick_slice_ms, lambda: bool(self.roster.seats)),
            settings.restart_wait_s,
        )
        self._arrivals = Arrivals(
            self.roster,
            opener,
            self._lanes,
            self.replies,
            self._say,
            running,
            starts_in_flight_max=settings.starts_in_flight_max,
            on_ended=self._on_ended,
            spawn=self._spawn,
            telemetry=telemetry,
        )
        self._heartbeats = Heartbeats(
            self._author,
            self.roster,
            worker=name,
            node=settings.node,
            lanes=list(self._lanes),
            capacity_sessions=1 if isolated else settings.sessions_per_worker_max,
            isolated=isolated,
            period_s=settings.heartbeat_period_s,
        )
        self._group: asyncio.TaskGroup
        self._placements_read = 0
        self._tell(telemetry, opener)

    def _tell(self, telemetry: Telemetry, opener: Opener) -> None:
        lanes = self._lanes.values()
        telemetry.counter(metrics.TICKS, lambda: sum(lane.ticks for lane in lanes))
        telemetry.counter(metrics.STEPS, lambda: sum(lane.steps for lane in lanes))
        telemetry.counter(metrics.ANCHORS_LOADED, lambda: opener.anchors_loaded)
        telemetry.counter(metrics.ANCHORS_MISSED, lambda: opener.anchors_missed)
        telemetry.gauge(metrics.SESSIONS_HOSTED, lambda: len(self.roster.seats))
        telemetry.gauge(metrics.WORKER_MEMORY, resident_bytes)

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
                    self._spawn(await self.replies.own(lane, start))
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
        if self.roster.placed(event):
            tail = Tail(message.sequence, event.circumstance.epoch)
            self._spawn(self._arrivals.take_in(event, tail))

    def _cancel(self, event: SessionCancelRequested) -> None:
        session_id, told = event.fact.session_id, event.circumstance
        given = cancel_input(told.code, told.reason or "")
        seat = self.roster.seats.get(session_id)
        if seat is not None:
            self._lanes[seat.placed.lane].give(seat, given)
        else:
            self.roster.early.cancel(session_id, given)  # a placement may be on its way

    def _change(self, event: CurriculumChanged) -> None:
        fact = event.fact
        given = curriculum_input(fact.n, fact.level)
        seat = self.roster.seats.get(fact.session_id)
        if seat is not None:
            seat.machine.deliver(given)  # runs no user code: it waits there for the next episode
        else:
            self.roster.early.change(fact.session_id, given)

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
        self._running.end_if_forked()
        self._running.clear()
        self.roster.close(placed.session_id, seat.index)

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
            await self._heartbeats.beat("ready", self._placements_read)
            await asyncio.sleep(self._settings.heartbeat_period_s)

    async def _drain(self) -> None:
        """Hand every live session back, as far as the time for it goes."""
        self._arrivals.closed = True
        await self._heartbeats.beat("draining", self._placements_read)

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
    worker.roster.heap.begin()
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
