"""What becomes of a tick: its rewards are published, then it is acknowledged.

Scoring is a function of the message, so a message may be handled any number of times, by any
replica, and gives the same facts under the same ids. Trouble of the machine's (no database, no
bus, no memory for a process) is never a missing reward: the message comes again, later and later.
Only what no retry can mend is put aside.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Protocol

from dsec.platform.bus import BadMessage, Bus, Message, Settler
from dsec.platform.clock import nanoseconds
from dsec.platform.telemetry import OFF, Span, Telemetry, metrics, parse_traceparent
from dsec.platform.telemetry.ids import child
from dsec.platform.telemetry.metrics import Metric
from dsec.reward.batch import Batch
from dsec.reward.effects import Spec, Specs, resolved
from dsec.reward.frames import Failure, Outcome, Task
from dsec.reward.settings import RewardSettings
from dsec_contracts import Envelope, SessionStepped, keys, subjects

log = logging.getLogger(__name__)

CONSUMER = "reward"
SOURCE = "dsec/reward"


class Functions(Protocol):
    """Runs users' functions: `Isolation`."""

    async def score(
        self, tasks: Sequence[Task], contents: Mapping[str, bytes]
    ) -> list[Outcome]: ...


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
    ) -> None:
        self._bus = bus
        self._specs = specs
        self._functions = functions
        self._blobs = blobs
        self._settings = settings
        self._now = now
        self._telemetry = telemetry
        self._counts: Counter[Metric] = Counter()
        for metric in (
            metrics.TICKS_REWARDED,
            metrics.REWARDS,
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
        )
        telemetry.counter(metrics.DEAD_LETTERS, lambda: self._settler.dead_letters)

    async def on_session_stepped(self, message: Message) -> None:
        """Score one tick and acknowledge it; never raises."""
        await self._settler.handle(message)

    async def _handle(self, message: Message) -> None:
        began = self._now()
        envelope, batch = _read(message)
        outcomes = await self._outcomes(batch, message.sequence)
        scored_at = self._now()
        lane = batch.event.circumstance.lane
        # Those first: should we die between the two, the repeated message has the same rows.
        for notice in batch.missing(outcomes):
            session, step = notice.fact.session_id, notice.fact.step
            log.warning("%s step %d: %s", session, step, notice.fact.code)
            self._counts[metrics.REWARDS_MISSING] += 1
            await self._bus.publish(
                notice,
                lane,
                source=SOURCE,
                time=self._now(),
                event_id=f"reward.{envelope.id}.missing.{session}.{step}",
                session_id=session,
                cause=keys.of(session, keys.step(step)),
                traceparent=envelope.traceparent,
            )
        limit = self._bus.max_payload_bytes
        for part, scored in enumerate(batch.scored(outcomes, self._settings.reward_replica, limit)):
            await self._bus.publish(
                scored,
                lane,
                source=SOURCE,
                time=self._now(),
                event_id=f"reward.{envelope.id}" + (f".{part}" if part else ""),
                traceparent=envelope.traceparent,
            )
            self._counts[metrics.REWARDS] += scored.rows
        self._counts[metrics.TICKS_REWARDED] += 1
        self._trace(envelope, batch, message, began, scored_at)

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

    async def _outcomes(self, batch: Batch, position: int) -> list[Outcome]:
        specs = {
            spec_hash: await self._specs.get(spec_hash, position)
            for spec_hash in dict.fromkeys(batch.specs)
            if spec_hash
        }
        outcomes = batch.env_outcomes()
        if "" not in batch.specs and all(spec.is_env for spec in specs.values()):
            return outcomes
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
            found = await self._functions.score(
                await self._tasks(batch, functions), _contents(specs)
            )
            for n, outcome in zip(functions, found, strict=True):
                outcomes[n] = outcome
        return outcomes

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
