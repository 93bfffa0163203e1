"""The scheduler's loop: receive, decide, publish, acknowledge.

Six loops share one state on one event loop, and none awaits in the middle of a change:
`_follow` takes events from the stream in its order, `_act` decides what is due and issues it,
`_refill` takes waiting requests from the log (`overflow.py`), `_move_levels` moves curriculum
levels, heartbeats come in beside them (`listening.py`). What is issued (`issuing.py`) is published
by tasks of its own. The state follows from what the stream shows, never from what was published: a
scheduler that takes over sees the same. Whatever cannot be mended here ends the process, and the
next one starts from log and stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any
from uuid import UUID

from dsec.platform.bus import Bus, BusUnavailable, Consumer, Message
from dsec.platform.cancellation import cancelled
from dsec.platform.log import Position
from dsec.platform.telemetry import OFF, Telemetry, metrics
from dsec.scheduler.admission import Ask, AskMalformed, Prior
from dsec.scheduler.curriculum import Curricula, decide_levels
from dsec.scheduler.decider import Limits, Tick, admit, decide
from dsec.scheduler.effects import Effects
from dsec.scheduler.fold import evolve
from dsec.scheduler.gauges import heartbeat_age_p95_s, utilisation, workers_ready
from dsec.scheduler.history import History
from dsec.scheduler.intake import FILTERS, Reading, Requested, read
from dsec.scheduler.intents import Reject
from dsec.scheduler.issuing import Issuing
from dsec.scheduler.leadership import Leadership, LeadershipLost
from dsec.scheduler.listening import Listening
from dsec.scheduler.overflow import Overflow
from dsec.scheduler.placement import RULES
from dsec.scheduler.recall import recall
from dsec.scheduler.recovery import LOG_AWAY, Recovered, patiently, recover, until_complete
from dsec.scheduler.settings import SchedulerConfig
from dsec.scheduler.state import SchedulerState
from dsec.scheduler.traces import Traces
from dsec_contracts.session import SessionEnded
from dsec_contracts.worker import WorkerFenced

log = logging.getLogger(__name__)

CONSUMER = "scheduler"
FETCH_MESSAGES_MAX = 256
FETCH_WAIT_S = 0.5
ACK_WAIT_S = 30.0
TICK_PERIOD_S = 0.1
REFILL_PERIOD_S = 0.2
LEVELS_PERIOD_S = 1.0
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
            heartbeat_period_s=config.heartbeat_period_s,
            heartbeat_limit_s=config.heartbeat_limit_s,
            max_restarts=config.session_lifecycle.max_restarts,
            worker_deaths_max=config.worker_deaths_max,
            session_absent_limit_s=config.session_absent_limit_s,
            moves_max=config.moves_max,
            call_every_s=config.rate_limited_services.call_every_s,
        )
        self.state = SchedulerState(monotonic(), config.curriculum_rules())
        self._traces = Traces(telemetry, self.state.closed)
        self._seen: Counter[type] = Counter()
        self._epoch = 0
        self._position = 0
        self._ordinal = 0
        self._caught_up = asyncio.Event()
        self._wake = asyncio.Event()
        self._listening = Listening(
            bus, self.state, monotonic, self._wake.set, period_s=config.heartbeat_period_s
        )
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
        await self._listening.begin()
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
                group.create_task(self._listening.hear_out()),
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
            if issued := self._issuing.tasks:
                _, late = await asyncio.wait(issued, timeout=STOP_WAIT_S_MAX)
                for task in late:
                    task.cancel()
        await consumer.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._group.create_task(work)

    async def _start_anew_when_complete(self) -> None:
        log.warning("the log waits for a recorder of this version: this starts anew once it led")
        await until_complete(self._history)
        raise DeliveryLost("what an earlier recorder had put aside is in the log now")

    async def _start_from(self, recovered: Recovered) -> Consumer:
        self._epoch, self._position = recovered.floor.epoch, recovered.floor.sequence
        effects = Effects(
            self._bus,
            self._history,
            epoch=self._epoch,
            restart_wait_s=self._config.session_lifecycle.restart_wait_s,
            now=self._now,
        )
        self._issuing = Issuing(self.state, effects, self._spawn, lambda: self._position)
        self._overflow = Overflow(
            self._history,
            self.state,
            self._issuing,
            start=recovered.overflow,
            queued_max=self._config.sessions_queued_max,
            limits=self._limits,
            now=self._now,
            on_taken=self._wake.set,
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
                    intents = decide(self.state, reading, self._now(), self._limits)
                    rejections += self._issuing.rejections(intents)
                case None:
                    pass
                case _:
                    evolve(self.state, reading, message.sequence)
        self._issuing.settle_refused()
        await self._issuing.reject(rejections)
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
        rejections = self._issuing.rejections(intents)
        if rejections:
            return rejections
        at = Position(self._epoch, sequence)
        new = self._overflow.has_room(at) and admit(self.state, command, sequence)
        if new and self._caught_up.is_set():  # else what follows may have happened already
            self._issuing.issue(intents)
        return []

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
            tick = Tick(at_s)
            self._issuing.issue(decide(self.state, tick, self._now(), self._limits, self._rule))
            try:
                async with asyncio.timeout(TICK_PERIOD_S):
                    await self._wake.wait()
            except TimeoutError:
                pass  # time alone makes things due
            self._wake.clear()

    async def _move_levels(self) -> None:
        """Curriculum levels, by what workers tell of rewards and what the log has of episodes."""
        await self._caught_up.wait()
        curricula = self.state.curricula
        while not cancelled():
            if not self._leadership.sure:
                raise LeadershipLost("it is not sure that nobody else leads")
            if curricula.rules.return_target is not None:
                try:
                    await self._read_returns(curricula)
                except LOG_AWAY as error:
                    log.warning("the returns of episodes cannot be read yet: %s", error)
            self._issuing.issue(list(decide_levels(curricula, self.state.lane_of)))
            await asyncio.sleep(LEVELS_PERIOD_S)

    async def _read_returns(self, curricula: Curricula) -> None:
        if not curricula.recalled:
            await recall(self._history, curricula, self._epoch, self.state.per_episode)
        elif unread := curricula.unread():
            curricula.read(await self._history.episodes(unread, self._epoch))

    # -- requests that wait in the log ---------------------------------------------------------

    async def _refill(self) -> None:
        await self._caught_up.wait()
        while not cancelled():
            more = await self._overflow.refill(lambda: Position(self._epoch, self._position))
            await asyncio.sleep(0 if more else REFILL_PERIOD_S)
