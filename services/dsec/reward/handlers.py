"""What becomes of a tick: its rewards are published, then it is acknowledged.

Scoring is a function of the message, so a message may be handled any number of times, by any
replica, and gives the same facts under the same ids. Trouble of the machine's (no database, no
bus, no memory for a process) is never a missing reward: the message comes again, later and later.
Only what no retry can mend is put aside.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from uuid import UUID

from dsec.platform.bus import BadMessage, Bus, Later, Message, Settler
from dsec.platform.clock import nanoseconds
from dsec.platform.telemetry import OFF, Span, Telemetry, metrics, parse_traceparent
from dsec.platform.telemetry.ids import child
from dsec.platform.telemetry.metrics import Metric
from dsec.reward.asking import Asking
from dsec.reward.batch import Batch
from dsec.reward.effects import Specs, resolved
from dsec.reward.episodes import EPISODES_A_TURN_MAX
from dsec.reward.frames import Failure, Needs, Outcome, Task
from dsec.reward.publishing import Publisher
from dsec.reward.settings import RewardSettings
from dsec.reward.turns import Functions, Turns
from dsec.reward.waiting import Beside, Scored, Tick, Waiting
from dsec_contracts import Envelope, SessionStepped, subjects

CONSUMER = "reward"
FUNCTION_TICKS_MAX = 32
"""Ticks at hand that wait for the functions' process. More would be taken from other replicas;
with fewer, ticks that need no function would wait for the turns of all before them."""


class Rewarder:
    """Scores ticks."""

    def __init__(
        self,
        bus: Bus,
        specs: Specs,
        functions: Functions,
        blobs: Callable[[str], bytes],
        settings: RewardSettings,
        now: Callable[[], datetime],
        telemetry: Telemetry = OFF,
        beside: Beside | None = None,
    ) -> None:
        """Prepare.

        Args:
            beside: what rows can wait for. Without it no function may ask a service, and none is
                checked for state that it keeps.
        """
        self._specs = specs
        self.turns = Turns(functions)
        self._blobs = blobs
        self._settings = settings
        self._now = now
        self._telemetry = telemetry
        self._counts: Counter[Metric] = Counter()
        self._publisher = Publisher(bus, settings.reward_replica, now, self._counts)
        self._recheck = beside.recheck if beside is not None else None
        self._episodes = beside.episodes if beside is not None else None
        self._waiting: Waiting | None = None
        if beside is not None:
            self._waiting = Waiting(self._publisher, self.turns, beside, settings)
        self._functions = asyncio.Semaphore(FUNCTION_TICKS_MAX)
        self._passed: dict[int, asyncio.Event] = {}
        self._closing = False
        for metric in (
            metrics.TICKS_REWARDED,
            metrics.REWARDS,
            metrics.REWARDS_DEFERRED,
            metrics.REWARDS_MISSING,
        ):
            telemetry.counter(metric, partial(self._counts.__getitem__, metric))
        self._settler = Settler(
            bus,
            CONSUMER,
            self._handle,
            ack_wait_s=settings.reward_ack_wait_s,
            retry_s_min=settings.reward_retry_s_min,
            retry_s_max=settings.reward_retry_s_max,
            # Those that wait, and the one that is passing.
            in_flight_max=settings.reward_ticks_waiting_max + 1,
        )
        telemetry.counter(metrics.DEAD_LETTERS, lambda: self._settler.dead_letters)

    async def on_session_stepped(self, message: Message) -> None:
        """Score one tick; never raises. Returns when all that asks nobody is rewarded: what waits
        for services is settled later, and must not hold up the next tick."""
        begins, passed = not self._closing, asyncio.Event()
        self._passed[id(message)] = passed
        await self._settler.begin(message)
        if begins:
            await passed.wait()
        else:
            self._passed.pop(id(message), None)

    async def close(self, wait_s: float) -> None:
        """Take no more ticks, hand back those that wait for a request that has not been made, and
        give the others their time."""
        self._closing = True
        if self._waiting is not None:
            self._waiting.stop()
        await self._settler.close(wait_s)

    async def _handle(self, message: Message) -> None:
        began = self._now()
        try:
            envelope, batch = _read(message)
            tick, outcomes = await self._first_pass(
                envelope, batch, message.sequence, partial(self._step_aside, message)
            )
            scored_at = self._now()
            await self._publisher.publish(envelope, batch, outcomes)
        finally:
            self._step_aside(message)
        if tick.closing:
            await self._close_episodes(tick, message.sequence)
        if self._waiting is not None and tick.rows():
            await self._waiting.settle(tick)
        self._counts[metrics.TICKS_REWARDED] += 1
        self._trace(envelope, batch, message, began, scored_at)

    def _step_aside(self, message: Message) -> None:
        """Let the next tick begin."""
        if (passed := self._passed.pop(id(message), None)) is not None:
            passed.set()

    def _trace(
        self, envelope: Envelope, batch: Batch, message: Message, began: datetime, scored: datetime
    ) -> None:
        """The span of one call, within the trace of its tick; the same for every delivery."""
        tick = parse_traceparent(envelope.traceparent)
        if tick is None or not self._telemetry.keeps(tick.trace_id):
            return
        self._telemetry.emit(
            Span(
                child(tick.trace_id, "reward", envelope.id),
                "reward",
                nanoseconds(began),
                nanoseconds(self._now()),
                tick,
                {
                    "dsec.lane": batch.event.circumstance.lane,
                    "dsec.rows": batch.event.rows,
                    "dsec.reward.replica": self._settings.reward_replica,
                    "dsec.reward.scoring_s": (scored - began).total_seconds(),
                    "dsec.delivery": message.delivered,
                },
            )
        )

    # -- the first pass --------------------------------------------------------------------------

    async def _first_pass(
        self, envelope: Envelope, batch: Batch, position: int, step_aside: Callable[[], None]
    ) -> tuple[Tick, list[Outcome | None]]:
        """The outcomes of all rows that ask no service, and the rows that do.

        A tick that waits for its turn at the functions' process, which may be starting, steps aside
        for those that need none.
        """
        specs = {
            spec_hash: await self._specs.get(spec_hash, position)
            for spec_hash in dict.fromkeys(batch.specs)
            if spec_hash
        }
        tick = Tick(envelope, batch, specs, {}, {}, {})
        outcomes: list[Outcome | None] = list(batch.env_outcomes())
        if "" not in batch.specs and all(spec.is_env for spec in specs.values()):
            return tick, outcomes
        functions = []
        for n, spec_hash in enumerate(batch.specs):
            spec = specs.get(spec_hash)
            if spec is None:
                outcomes[n] = Failure("reward_load_failed", "the step names no reward spec")
            elif spec.error is not None:
                outcomes[n] = Failure(spec.error.code, spec.error.message)
            elif spec.per_episode:
                outcomes[n] = None  # a step within an episode has no reward, and will have none
                if n in batch.closing:
                    tick.closing[n] = batch.closing[n]
            elif (failure := self._known_failure(spec_hash)) is not None:
                outcomes[n] = failure
            elif not spec.is_env:
                functions.append(n)
        if functions:
            async with self._functions:
                step_aside()
                tasks = await self._tasks(batch, functions)
                found = await self.turns.score(tasks, tick.contents)
            self._take(tick, outcomes, list(map(Scored, functions, tasks, found)), position)
        return tick, outcomes

    async def _close_episodes(self, tick: Tick, position: int) -> None:
        """Score the episodes that rows close, once the log has them."""
        if self._episodes is None:
            raise Later(self._settings.reward_retry_s_max, "there is no log to read episodes from")
        closing = list(tick.closing)
        for first in range(0, len(closing), EPISODES_A_TURN_MAX):
            await self._close_some(tick, closing[first : first + EPISODES_A_TURN_MAX], position)

    async def _close_some(self, tick: Tick, closing: Sequence[int], position: int) -> None:
        """A few of them: each may have many megabytes, and a turn has a bound."""
        assert self._episodes is not None
        outcomes: list[Outcome | None] = [None] * tick.batch.event.rows
        for n in closing:
            outcomes[n] = self._known_failure(tick.batch.specs[n])
        rows = [n for n in closing if outcomes[n] is None]
        read = partial(self._episodes.task, tick.batch, position=position)
        tasks: dict[int, Task] = {}
        found = await asyncio.gather(*[read(n, tick.closing[n]) for n in rows])
        for n, one in zip(rows, found, strict=True):
            if isinstance(one, Failure):
                outcomes[n] = one
            else:
                tasks[n] = one
        if tasks:
            async with self._functions:
                bodies = await self.turns.score(list(tasks.values()), tick.contents)
            scored = list(map(Scored, tasks, tasks.values(), bodies))
            self._take(tick, outcomes, scored, position)
        await self._publisher.publish(tick.envelope, tick.batch, outcomes, later=closing)

    def _take(
        self, tick: Tick, outcomes: list[Outcome | None], scored: Sequence[Scored], position: int
    ) -> None:
        """Note outcomes, but for those of the rows that are left open."""
        for one in scored:
            outcomes[one.row] = one.outcome
        self._leave_open(tick, scored, position)
        for n in tick.rows():
            outcomes[n] = None

    def _known_failure(self, spec_hash: str) -> Failure | None:
        return None if self._recheck is None else self._recheck.failure(spec_hash)

    def _leave_open(self, tick: Tick, scored: Sequence[Scored], position: int) -> None:
        """Sort out the rows that have to wait."""
        by_spec: dict[str, list[Scored]] = {}
        for one in scored:
            if isinstance(one.outcome, Needs):
                if self._waiting is None:
                    raise RuntimeError("a reward function asks services, and there are none here")
                session, step = tick.batch.sessions[one.row], tick.batch.steps[one.row]
                key = f"{UUID(bytes=session)}.{step}"
                may = tick.specs[one.task.spec].services
                tick.asking[one.row] = Asking(one.task, one.outcome, key, position, False, may)
            elif type(one.outcome) is bytes:
                by_spec.setdefault(one.task.spec, []).append(one)
        for spec, rows in by_spec.items():
            if self._recheck is not None and self._recheck.is_due(spec, len(rows)):
                tick.checking.setdefault(spec, []).extend(rows)

    async def _tasks(self, batch: Batch, rows: Sequence[int]) -> list[Task]:
        tasks = batch.tasks(rows)
        if not any(b"\xa2" in (t.observation[:1], t.next_observation[:1]) for t in tasks):
            return tasks
        return await asyncio.to_thread(self._resolved, tasks)

    def _resolved(self, tasks: Sequence[Task]) -> list[Task]:
        return [
            Task(
                t.spec,
                t.fact,
                resolved(t.observation, self._blobs),
                resolved(t.next_observation, self._blobs),
            )
            for t in tasks
        ]


def _read(message: Message) -> tuple[Envelope, Batch]:
    event = message.event_of(SessionStepped)
    try:
        subjects.token(event.circumstance.lane)
    except ValueError as error:
        raise BadMessage(f"circumstance.lane: {error}") from error
    return message.envelope(), Batch(event)
