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

from pydantic import ValidationError

from dsec.platform.bus import BadMessage, Bus, Message, Signals, settle
from dsec.platform.clock import nanoseconds
from dsec.platform.telemetry import OFF, Span, Telemetry, metrics, parse_traceparent
from dsec.platform.telemetry.ids import child
from dsec.platform.telemetry.metrics import Metric
from dsec.reward.batch import Batch
from dsec.reward.effects import Spec, Specs, resolved
from dsec.reward.frames import Failure, Outcome, Task
from dsec.reward.settings import RewardSettings
from dsec_contracts import Envelope, EnvelopeError, SessionStepped, UnknownEvent, keys, subjects

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
            metrics.DEAD_LETTERS,
        ):
            telemetry.counter(metric, partial(self._counts.__getitem__, metric))

    async def on_session_stepped(self, message: Message) -> None:
        """Score one tick and acknowledge it; never raises."""
        signals = Signals(message, self._settings.reward_ack_wait_s / 2)
        try:
            await self._handle(message)
        except UnknownEvent as error:
            # Written by a newer version: one of its replicas takes it, or we after the upgrade.
            log.warning("message %d waits for an upgrade: %s", message.sequence, error)
            await settle(message.nak(self._settings.reward_retry_s_max))
        except (BadMessage, EnvelopeError, ValidationError) as error:
            await self._put_aside(message, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the message comes again
            delay_s = self._retry_s(message)
            log.warning("message %d again in %.1f s: %r", message.sequence, delay_s, error)
            await settle(message.nak(delay_s))
        else:
            await settle(message.ack())
        finally:
            signals.cancel()

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

    # -- acknowledgements ----------------------------------------------------------------------

    def _retry_s(self, message: Message) -> float:
        first, most = self._settings.reward_retry_s_min, self._settings.reward_retry_s_max
        return float(min(most, first * 2 ** min(message.delivered - 1, 30)))

    async def _put_aside(self, message: Message, error: Exception) -> None:
        log.error("message %d is put aside: %s", message.sequence, error)
        try:
            await self._bus.dead_letter(message, CONSUMER, str(error))
        except Exception as refused:  # noqa: BLE001 - not put aside: it must come again
            log.warning("and could not be put aside: %r", refused)
            await settle(message.nak(self._retry_s(message)))
        else:
            self._counts[metrics.DEAD_LETTERS] += 1
            await settle(message.ack())


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
