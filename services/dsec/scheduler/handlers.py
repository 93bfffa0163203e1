"""The scheduler's loop: receive, decide, publish, acknowledge.

Six loops share one state on one event loop, and none awaits in the middle of a change:
`_follow` takes events from the stream in its order, `_act` decides what is due and publishes it,
`_refill` takes waiting requests from the log, `_move_levels` moves curriculum levels, heartbeats
come in beside them, and `_hear_out` says until when there were none but those. The state follows
from what the stream shows, never from what was published: a scheduler that takes over sees the
same. Whatever cannot be mended here ends the process, and the next one starts from log and stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from uuid import UUID

from dsec.platform.bus import Bus, BusError, BusUnavailable, Consumer, Message
from dsec.platform.bus.retry import AWAY
from dsec.platform.cancellation import cancelled
from dsec.platform.log import Position
from dsec.platform.telemetry import OFF, Telemetry, metrics
from dsec.scheduler.admission import Ask, AskMalformed, Prior
from dsec.scheduler.curriculum import decide_levels
from dsec.scheduler.decider import Limits, Tick, admit, decide
from dsec.scheduler.effects import Effects, Withdrawn
from dsec.scheduler.fold import evolve, hear
from dsec.scheduler.gauges import heartbeat_age_p95_s, utilisation, workers_ready
from dsec.scheduler.history import History, flat
from dsec.scheduler.in_flight import issued, withdrawn
from dsec.scheduler.intake import (
    FILTERS,
    Reading,
    Requested,
    read,
    read_heartbeat,
)
from dsec.scheduler.intents import End, Intent, Reject
from dsec.scheduler.leadership import Leadership, LeadershipLost
from dsec.scheduler.placement import RULES
from dsec.scheduler.recovery import LOG_AWAY, Recovered, patiently, recover, until_complete
from dsec.scheduler.settings import SchedulerConfig
from dsec.scheduler.state import SchedulerState
from dsec.scheduler.traces import Traces
from dsec_contracts.session import SessionEnded
from dsec_contracts.worker import WorkerFenced

log = logging.getLogger(__name__)

CONSUMER = "scheduler"
HEARTBEATS = "dsec.worker.heartbeat.*"
FETCH_MESSAGES_MAX = 256
FETCH_WAIT_S = 0.5
ACK_WAIT_S = 30.0
TICK_PERIOD_S = 0.1
REFILL_PERIOD_S = 0.2
HEARD_PERIOD_S = 0.25
LEVELS_PERIOD_S = 1.0
REFILL_REQUESTS_MAX = 500
PUBLISHES_IN_FLIGHT_MAX = 128
ENDS_IN_FLIGHT_MAX = 16
STOP_WAIT_S_MAX = 5.0


class DeliveryLost(Exception):
    """Somebody else read from our consumer, or a delivery got lost: start anew from the log."""


class Scheduler:
    """One scheduler that leads."""

    def __init__(
        self,
        bus: Bus,
        history: History,
        config: SchedulerConfig,
        leadership: Leadership,
        *,
        now: Callable[[], datetime],
        monotonic: Callable[[], float],
        telemetry: Telemetry = OFF,
    ) -> None:
        self._bus = bus
        self._history = history
        self._config = config
        self._leadership = leadership
        self._now = now
        self._monotonic = monotonic
        self._rule = RULES[config.placement]
        self._limits = Limits(
            config.heartbeat_period_s,
            config.heartbeat_limit_s,
            config.session_lifecycle.max_restarts,
            config.worker_deaths_max,
            config.session_absent_limit_s,
            config.moves_max,
            config.rate_limited_services.call_every_s,
        )
        self.state = SchedulerState(monotonic(), config.curriculum_rules())
        self._traces = Traces(telemetry, self.state.closed)
        self._seen: Counter[type] = Counter()
        self._epoch = 0
        self._position = 0
        self._ordinal = 0
        self._overflow: Position | None = None
        self._caught_up = asyncio.Event()
        self._wake = asyncio.Event()
        self._publishing = asyncio.Semaphore(PUBLISHES_IN_FLIGHT_MAX)
        self._ending = asyncio.Semaphore(ENDS_IN_FLIGHT_MAX)
        self._refused: list[tuple[int, Intent]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._tell(telemetry)

    def _tell(self, telemetry: Telemetry) -> None:
        state, seen = self.state, self._seen
        telemetry.gauge(metrics.RUS, lambda: utilisation(state))
        telemetry.gauge(
            metrics.SESSION_HEARTBEAT_P95, lambda: heartbeat_age_p95_s(state, self._monotonic())
        )
        telemetry.gauge(metrics.SESSIONS_QUEUED, lambda: state.queued)
        telemetry.gauge(metrics.SESSIONS_PLACED, lambda: len(state.sessions) - state.queued)
        telemetry.gauge(metrics.WORKERS_READY, lambda: workers_ready(state))
        telemetry.counter(metrics.SESSIONS_ENDED, lambda: seen[SessionEnded])
        telemetry.counter(metrics.WORKERS_FENCED, lambda: seen[WorkerFenced])

    async def run(self, stop: asyncio.Event) -> None:
        """Schedule until told to stop.

        Raises:
            LeadershipLost, DeliveryLost, BusError: this process cannot go on; another one can.
        """
        self.state.heard_until_s = self._monotonic()
        await self._bus.listen(HEARTBEATS, self._on_heartbeat)
        before = {state.name: state.floor for state in await self._bus.consumers()}
        self._traces.follow(before.get(CONSUMER))
        recovered = await recover(self._bus, self._history, self.state, self._traces)
        consumer = await self._start_from(recovered)
        stream = await self._bus.stream_state()
        if stream.first_sequence > recovered.floor.sequence + 1 and CONSUMER not in before:
            # Nobody held the trimmer back before there was a durable. Now there is.
            raise DeliveryLost("what came after the log was read has been trimmed meanwhile")
        target = stream.last_sequence
        async with asyncio.TaskGroup() as group:
            self._group = group
            loops = [
                group.create_task(self._follow(consumer, target)),
                group.create_task(self._hear_out()),
                group.create_task(self._act()),
                group.create_task(self._refill()),
                group.create_task(self._move_levels()),
            ]
            if recovered.incomplete:
                loops.append(group.create_task(self._start_anew_when_complete()))
            await stop.wait()
            for loop in loops:
                loop.cancel()
            # What is being published is let through; an end that waits for the log is not.
            if self._tasks:
                _, late = await asyncio.wait(self._tasks, timeout=STOP_WAIT_S_MAX)
                for task in late:
                    task.cancel()
        await consumer.close()

    async def _start_anew_when_complete(self) -> None:
        log.warning("the log waits for a recorder of this version: this starts anew once it led")
        await until_complete(self._history)
        raise DeliveryLost("what an earlier recorder had put aside is in the log now")

    async def _start_from(self, recovered: Recovered) -> Consumer:
        self._epoch, self._position = recovered.floor.epoch, recovered.floor.sequence
        self._overflow = recovered.overflow
        self._effects = Effects(
            self._bus,
            self._history,
            epoch=self._epoch,
            restart_wait_s=self._config.session_lifecycle.restart_wait_s,
            now=self._now,
        )
        # A consumer's start is settled when it is made, and ours is the floor: make it anew.
        await self._bus.delete_consumer(CONSUMER)
        return await self._bus.consumer(
            CONSUMER,
            FILTERS,
            start_sequence=self._position + 1,
            ack="all",
            ack_wait_s=ACK_WAIT_S,
        )

    # -- receive -------------------------------------------------------------------------------

    async def _follow(self, consumer: Consumer, target: int) -> None:
        while not cancelled():
            if not self._leadership.sure:
                raise LeadershipLost("it is not sure that nobody else leads")
            if not self._caught_up.is_set() and await self._has_all(consumer, target):
                self._caught_up.set()
                log.info("leading, from position %d", self._position)
            asked_s = self._monotonic()
            messages = await self._fetch(consumer)
            if messages:
                await self._take(messages)
                self._wake.set()
            if len(messages) < FETCH_MESSAGES_MAX:
                self.state.followed_until_s = asked_s  # there was no more to be had

    async def _has_all(self, consumer: Consumer, target: int) -> bool:
        """Whether the state has what the stream had when we began, as far as it is ours."""
        if self._position >= target:
            return True
        state = await consumer.state()
        # What is on its way to us is no longer pending, and not in the state yet.
        return state.pending == 0 and state.delivered <= self._position

    async def _fetch(self, consumer: Consumer) -> list[Message]:
        try:
            return await consumer.fetch(FETCH_MESSAGES_MAX, FETCH_WAIT_S)
        except Exception as error:
            if self._bus.connected:
                raise
            raise BusUnavailable(f"the bus went away: {error!r}") from error

    async def _take(self, messages: list[Message]) -> None:
        fresh: list[tuple[Message, Reading]] = []
        position = self._position
        for message in messages:
            self._ordinal += 1
            if message.consumer_sequence != self._ordinal:
                raise DeliveryLost(f"delivery {self._ordinal} of {CONSUMER} went elsewhere")
            if message.sequence <= position:
                if message.delivered == 1:
                    raise DeliveryLost(f"the stream was set back behind {position}")
            else:
                position = message.sequence
                fresh.append((message, read(message, self._epoch)))
        priors = await self._priors(fresh)
        rejections: list[Reject] = []
        # Not before: until here the state lacks this batch, and others read by the position.
        self._position = position
        for message, reading in fresh:
            self._seen[type(reading)] += 1
            self._traces.seen(message, reading)
            match reading:
                case Requested(event_id, event):
                    prior = priors.get(event.fact.session_id)
                    command = Ask(event_id, event.fact, prior)
                    rejections += self._ask(command, message.sequence)
                case AskMalformed():
                    rejections += self._reject(
                        decide(self.state, reading, self._now(), self._limits)
                    )
                case None:
                    pass
                case _:
                    evolve(self.state, reading, message.sequence)
        self._settle_refused()
        # A rejection has no state of its own in the log: publish it, then acknowledge the request.
        await asyncio.gather(*(self._effects.carry_out(one) for one in rejections))
        await messages[-1].ack()

    async def _priors(self, fresh: list[tuple[Message, Reading]]) -> dict[UUID, Prior]:
        """What the log knows of the ids in a batch of requests that memory does not know."""
        asked: dict[UUID, Position] = {}
        for message, reading in fresh:
            if isinstance(reading, Requested):
                session_id = reading.event.fact.session_id
                if session_id not in self.state.sessions and session_id not in self.state.refused:
                    asked.setdefault(session_id, Position(self._epoch, message.sequence))
        if not asked:
            return {}
        return await patiently()(self._history.prior, asked)

    def _ask(self, command: Ask, sequence: int) -> list[Reject]:
        intents = decide(self.state, command, self._now(), self._limits)
        rejections = self._reject(intents)
        if rejections:
            return rejections
        if self._overflow is None and self.state.queued >= self._config.sessions_queued_max:
            log.warning("%d sessions wait: later requests wait in the log", self.state.queued)
            self._overflow = Position(self._epoch, sequence)
        new = self._overflow is None and admit(self.state, command, sequence)
        if new and self._caught_up.is_set():  # else what follows may have happened already
            self._issue(intents)
        return []

    def _reject(self, intents: list[Intent]) -> list[Reject]:
        rejections = [intent for intent in intents if isinstance(intent, Reject)]
        for rejection in rejections:
            issued(self.state, rejection)
        return rejections

    async def _on_heartbeat(self, headers: Mapping[str, str], data: bytes) -> None:
        heartbeat = read_heartbeat(headers, data)
        if heartbeat is not None:
            hear(self.state, heartbeat, self._monotonic())
            self._wake.set()

    async def _hear_out(self) -> None:
        """Know until when heartbeats were heard: they may lie in the server's buffers or in ours
        while this process, or the machine, is busy."""
        while not cancelled():
            asked_s = self._monotonic()
            with contextlib.suppress(*AWAY, BusError):
                await self._bus.stream_state()  # its answer comes behind what was there before it
                await asyncio.sleep(0)  # which is heard in a task of its own
                self.state.heard_until_s = asked_s
            await asyncio.sleep(HEARD_PERIOD_S)

    # -- decide and publish --------------------------------------------------------------------

    async def _act(self) -> None:
        await self._caught_up.wait()
        looked_s = self._monotonic()
        while not cancelled():
            if not self._leadership.sure:
                raise LeadershipLost("it is not sure that nobody else leads")
            at_s = self._monotonic()
            if at_s - looked_s > self._config.heartbeat_period_s or not self._bus.connected:
                # We were asleep or cut off: that nobody was heard says nothing about them.
                self.state.listening_since_s = at_s
            looked_s = at_s
            self._issue(decide(self.state, Tick(at_s), self._now(), self._limits, self._rule))
            try:
                async with asyncio.timeout(TICK_PERIOD_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    def _issue(self, intents: list[Intent]) -> None:
        for intent in intents:
            issued(self.state, intent)
            task = self._group.create_task(self._carry_out(intent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, intent: Intent) -> None:
        async with self._ending if isinstance(intent, End) else self._publishing:
            outcome = await self._effects.carry_out(intent)
        match outcome:
            case Withdrawn(None):
                withdrawn(self.state, intent)
            case Withdrawn(int(sequence)):
                log.info("somebody placed a session before us, at %d", sequence)
                self._refused.append((sequence, intent))
                self._settle_refused()

    def _settle_refused(self) -> None:
        """Placements that were refused are due again once the stream has shown us why."""
        waiting = self._refused
        self._refused = []
        for sequence, intent in waiting:
            if sequence <= self._position:
                withdrawn(self.state, intent, sequence)
            else:
                self._refused.append((sequence, intent))

    async def _move_levels(self) -> None:
        """Curriculum levels, by what workers tell of rewards and what the log has of episodes."""
        await self._caught_up.wait()
        curricula = self.state.curricula
        while not cancelled():
            if not self._leadership.sure:
                raise LeadershipLost("it is not sure that nobody else leads")
            if curricula.rules.return_target is not None and (unread := curricula.unread()):
                try:
                    curricula.read(await self._history.episodes(unread))
                except LOG_AWAY as error:
                    log.warning("the returns of episodes cannot be read yet: %s", error)
            self._issue(list(decide_levels(curricula, self.state.lane_of)))
            await asyncio.sleep(LEVELS_PERIOD_S)

    # -- requests that wait in the log ---------------------------------------------------------

    async def _refill(self) -> None:
        await self._caught_up.wait()
        while not cancelled():
            room = self._config.sessions_queued_max - self.state.queued
            room = min(room, REFILL_REQUESTS_MAX)
            more = False
            if self._overflow is not None and room > 0:
                try:
                    more = await self._refill_once(self._overflow, room)
                except LOG_AWAY as error:
                    log.warning("requests that wait in the log cannot be read yet: %s", error)
            await asyncio.sleep(0 if more else REFILL_PERIOD_S)

    def _known(self, floor: Position) -> Position:
        """How far the log may be read. It may be ahead of us, and of what follows our state we do
        not know yet what it builds on, such as the specs that were registered just before."""
        return min(floor, Position(self._epoch, self._position))

    async def _refill_once(self, start: Position, room: int) -> bool:
        """Take up to `room` requests from the log, in order. True: there may be more."""
        row = await self._history.floor()
        if row is None:
            return False
        upto = self._known(row.floor)
        found = await self._history.waiting(start, upto, room)
        for one in found:
            command = Ask(one.event_id, one.request, Prior(None, False, one.cancel))
            sequence = flat(one.at, self._epoch)
            intents = decide(self.state, command, self._now(), self._limits)
            rejections = self._reject(intents)
            for rejection in rejections:
                await self._effects.carry_out(rejection)
            if not rejections and admit(self.state, command, sequence):
                self._issue(intents)
        self._wake.set()
        if len(found) == room:
            last = found[-1].at
            self._overflow = Position(last.epoch, last.sequence + 1)
        elif upto >= Position(self._epoch, self._position):
            self._overflow = None  # the log has no more, and neither has the stream
        else:
            self._overflow = Position(upto.epoch, upto.sequence + 1)
        return len(found) == room
