"""What a tick's rows became, on the bus: rewards in columns, notices one by one."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from dsec.platform.bus import Bus
from dsec.platform.telemetry import metrics
from dsec.platform.telemetry.metrics import Metric
from dsec.reward.batch import Batch
from dsec.reward.frames import Outcome
from dsec_contracts import Envelope, RewardDeferred, RewardMissing, keys

log = logging.getLogger(__name__)

SOURCE = "dsec/reward"


class Publisher:
    """Publishes for one replica. Whatever is published again has the same id."""

    def __init__(
        self, bus: Bus, replica: str, now: Callable[[], datetime], counts: Counter[Metric]
    ) -> None:
        self._bus = bus
        self._replica = replica
        self._now = now
        self._counts = counts

    async def publish(
        self,
        envelope: Envelope,
        batch: Batch,
        outcomes: Sequence[Outcome | None],
        responses: Mapping[int, bytes] | None = None,
        later: Iterable[int] = (),
    ) -> None:
        """Rewards and notices of the rows that have an outcome.

        Args:
            envelope: of the tick.
            responses: what services answered, by row, also to those that got no reward. Those rows
                come after the others of their tick, in messages that are named by them.
            later: further rows that do.
        """
        rows = [*(responses or ()), *later]
        # Notices first: should we die between the two, the repeated message has the same rows.
        for notice in batch.missing(outcomes, responses):
            log.warning(
                "%s step %d: %s", notice.fact.session_id, notice.fact.step, notice.fact.code
            )
            self._counts[metrics.REWARDS_MISSING] += 1
            await self._notify(envelope, batch, notice, "missing")
        limit = self._bus.max_payload_bytes
        name = f"reward.{envelope.id}" + (_of_rows(rows) if rows else "")
        begin = 0
        for scored in batch.scored(outcomes, self._replica, limit, responses):
            end = begin + scored.rows
            await self._bus.publish(
                scored,
                batch.event.circumstance.lane,
                source=SOURCE,
                time=self._now(),
                # What services answered decides where it is cut: made again after a crash, a
                # message that has other rows must not be taken for a repetition.
                event_id=name + (f".{begin}-{end}" if begin or rows else ""),
                traceparent=envelope.traceparent,
            )
            self._counts[metrics.REWARDS] += scored.rows
            begin = end

    async def defer(self, envelope: Envelope, batch: Batch, rows: Sequence[int]) -> None:
        """Notices that the rewards of some rows come later."""
        for notice in batch.deferred(rows):
            self._counts[metrics.REWARDS_DEFERRED] += 1
            await self._notify(envelope, batch, notice, "deferred")

    async def _notify(
        self, envelope: Envelope, batch: Batch, notice: RewardMissing | RewardDeferred, what: str
    ) -> None:
        session, step = notice.fact.session_id, notice.fact.step
        await self._bus.publish(
            notice,
            batch.event.circumstance.lane,
            source=SOURCE,
            time=self._now(),
            event_id=f"reward.{envelope.id}.{what}.{session}.{step}",
            session_id=session,
            cause=keys.of(session, keys.step(step)),
            traceparent=envelope.traceparent,
        )


def _of_rows(rows: Iterable[int]) -> str:
    told = ",".join(map(str, sorted(rows))).encode()
    return f".rows.{hashlib.sha256(told).hexdigest()[:16]}"
