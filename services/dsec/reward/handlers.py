"""What becomes of a tick: its rewards are published, then it is acknowledged.

Scoring is a function of the message, so a message may be handled any number of times, by any
replica, and gives the same facts under the same ids. Trouble of the machine's (no database, no
bus, no memory for a process) is never a missing reward: the message comes again, later and later.
Only what no retry can mend is put aside.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from uuid import UUID

from dsec.platform.bus import BadMessage, Bus, Later, Message, Settler
from dsec.platform.clock import nanoseconds
from dsec.platform.telemetry import OFF, Span, Telemetry, metrics, parse_traceparent
from dsec.platform.telemetry.ids import child
from dsec.platform.telemetry.metrics import Metric
from dsec.reward.asking import Answered, Asking, Outsides
from dsec.reward.batch import Batch
from dsec.reward.effects import Keep, Spec, Specs, resolved
from dsec.reward.frames import Failure, Needs, Outcome, Task
from dsec.reward.publishing import Publisher
from dsec.reward.settings import RewardSettings
from dsec.reward.turns import Functions, Turns
from dsec_contracts import Envelope, SessionStepped, subjects

CONSUMER = "reward"
LINGER_S = 0.005
"""Rows that are answered within this of each other travel in one message."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A message, and what its first pass came to."""

    envelope: Envelope
    batch: Batch
    position: int
    contents: Mapping[str, bytes]
    asking: Mapping[int, Asking]
    """Rows whose functions want responses of services."""


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
        outsides: Outsides | None = None,
        keep: Keep | None = None,
    ) -> None:
        self._specs = specs
        self._turns = Turns(functions)
        self._blobs = blobs
        self._settings = settings
        self._now = now
        self._telemetry = telemetry
        self._outsides = outsides
        self._keep = keep or Keep(None)
        self._counts: Counter[Metric] = Counter()
        self._publisher = Publisher(bus, settings.reward_replica, now, self._counts)
        self._passed: dict[int, asyncio.Event] = {}
        self._at_work: set[tuple[bytes, int, bytes]] = set()
        self._waiting = 0
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
        """Take no more ticks, and give those at hand their time."""
        self._closing = True
        await self._settler.close(wait_s)

    async def _handle(self, message: Message) -> None:
        began = self._now()
        try:
            envelope, batch = _read(message)
            tick, outcomes = await self._first_pass(envelope, batch, message.sequence)
            scored_at = self._now()
            await self._publisher.publish(envelope, batch, outcomes)
        finally:
            if (passed := self._passed.pop(id(message), None)) is not None:
                passed.set()
        if tick.asking:
            await self._ask(tick)
        self._counts[metrics.TICKS_REWARDED] += 1
        self._trace(envelope, batch, message, began, scored_at)

    # -- services ------------------------------------------------------------------------------

    async def _ask(self, tick: Tick) -> None:
        """Have the rows that ask services answered, and publish each soon after it is."""
        # A lane that heard nothing asks again; what is at work here is answered once.
        names = {n: tick.batch.name(n) for n in tick.asking}
        rows = [n for n, name in names.items() if name not in self._at_work]
        if not rows:
            return
        if self._waiting >= self._settings.reward_ticks_waiting_max:
            raise Later(self._settings.reward_service_retry_s, "too many ticks wait for services")
        self._at_work.update(names[n] for n in rows)
        self._waiting += 1
        try:
            later = await self._later(tick, rows)
            await self._publisher.defer(tick.envelope, tick.batch, sorted(later))
            await self._publish_as_they_come(
                tick, {n: tick.asking[n]._replace(batched=n in later) for n in rows}
            )
        finally:
            self._waiting -= 1
            self._at_work.difference_update(names[n] for n in rows)

    async def _later(self, tick: Tick, rows: Sequence[int]) -> set[int]:
        """The rows whose rewards are deferred: a service is slow, and their sessions can wait."""
        assert self._outsides is not None
        found: set[int] = set()
        for n in rows:
            if tick.batch.sessions[n].hex() in tick.batch.deferrable:
                row = tick.asking[n]
                if await self._outsides.is_deferred(row.needs, row.position):
                    found.add(n)
        return found

    async def _publish_as_they_come(self, tick: Tick, rows: Mapping[int, Asking]) -> None:
        running = {asyncio.create_task(self._answered(tick, row)): n for n, row in rows.items()}
        errors: list[BaseException] = []
        try:
            while running:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(LINGER_S)
                outcomes: list[Outcome | None] = [None] * tick.batch.event.rows
                responses: dict[int, bytes] = {}
                for task in [task for task in running if task.done()]:
                    n = running.pop(task)
                    if (error := task.exception()) is not None:
                        errors.append(error)
                    else:
                        outcomes[n], responses[n] = task.result()
                if responses:
                    await self._publisher.publish(tick.envelope, tick.batch, outcomes, responses)
        finally:
            for task in running:
                task.cancel()
        if errors:
            raise errors[0]  # the message comes again, for what it has not got

    async def _answered(self, tick: Tick, row: Asking) -> Answered:
        assert self._outsides is not None
        content = tick.contents[row.task.spec]
        found = await self._outsides.answer(row, lambda task: self._turns.again(task, content))
        if type(found.outcome) is not bytes:
            return found
        return await self._keep.kept(found)

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
        self, envelope: Envelope, batch: Batch, position: int
    ) -> tuple[Tick, list[Outcome | None]]:
        """The outcomes of all rows that ask no service, and the rows that do."""
        specs = {
            spec_hash: await self._specs.get(spec_hash, position)
            for spec_hash in dict.fromkeys(batch.specs)
            if spec_hash
        }
        contents = _contents(specs)
        outcomes: list[Outcome | None] = list(batch.env_outcomes())
        asking: dict[int, Asking] = {}
        tick = Tick(envelope, batch, position, contents, asking)
        if "" not in batch.specs and all(spec.is_env for spec in specs.values()):
            return tick, outcomes
        functions = []
        for n, spec_hash in enumerate(batch.specs):
            spec = specs.get(spec_hash)
            if spec is None:
                outcomes[n] = Failure("reward_load_failed", "the step names no reward spec")
            elif spec.error is not None:
                outcomes[n] = Failure(spec.error.code, spec.error.message)
            elif not spec.is_env:
                functions.append(n)
        if functions:
            tasks = await self._tasks(batch, functions)
            found = await self._turns.score(tasks, contents)
            for n, task, outcome in zip(functions, tasks, found, strict=True):
                outcomes[n] = outcome
                if isinstance(outcome, Needs):
                    outcomes[n] = None
                    key = f"{UUID(bytes=batch.sessions[n])}.{batch.steps[n]}"
                    asking[n] = Asking(task, outcome, key, position, False)
        if asking and self._outsides is None:
            raise RuntimeError("a reward function asks services, and this replica has none")
        return tick, outcomes

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
    event = message.event()
    if not isinstance(event, SessionStepped):
        raise BadMessage(f"{type(event).__name__} on {message.subject}")
    try:
        subjects.token(event.circumstance.lane)
    except ValueError as error:
        raise BadMessage(f"circumstance.lane: {error}") from error
    return message.envelope(), Batch(event)


def _contents(specs: Mapping[str, Spec]) -> dict[str, bytes]:
    return {spec_hash: spec.content for spec_hash, spec in specs.items()}
