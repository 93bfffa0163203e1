"""What becomes of a captured anchor: it is stored or lost, that is said, and then acknowledged.

A message may come again, to this replica or another. Storing is by content and written once, the
answer has one natural key, and the first counts: so whoever repeats it changes nothing. While the
object store is away nothing is acknowledged, and the anchors wait in the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from dsec.anchor_sync.effects import Lost, Stored, keep
from dsec.anchor_sync.settings import AnchorSyncSettings
from dsec.anchor_sync.traces import settled
from dsec.platform.bus import Bus, Message, Settler
from dsec.platform.objects import BlobNotFound, ObjectStore
from dsec.platform.telemetry import OFF, Telemetry, metrics
from dsec_contracts import (
    AnchorCaptured,
    AnchorLost,
    AnchorStored,
    Event,
    keys,
)
from dsec_contracts.anchor import AnchorLostFact, AnchorOutcomeCircumstance, AnchorStoredFact

log = logging.getLogger(__name__)

CONSUMER = "anchor-sync"
SOURCE = "dsec/anchor-sync"


class Keeper:
    """Stores anchors, several at a time."""

    def __init__(
        self,
        bus: Bus,
        store: ObjectStore,
        settings: AnchorSyncSettings,
        now: Callable[[], datetime],
        telemetry: Telemetry = OFF,
    ) -> None:
        self._telemetry = telemetry
        self._bus = bus
        self._store = store
        self._settings = settings
        self._now = now
        self._settler = Settler(
            bus,
            CONSUMER,
            self._work,
            ack_wait_s=settings.anchor_ack_wait_s,
            retry_s_min=settings.anchor_retry_s_min,
            retry_s_max=settings.anchor_retry_s_max,
            in_flight_max=settings.anchors_in_flight_max,
        )
        self.stored = 0
        self.lost = 0
        telemetry.counter(metrics.DEAD_LETTERS, lambda: self._settler.dead_letters)

    async def on_anchor_captured(self, message: Message) -> None:
        """Begin to work on an anchor; never raises. Waits only while there are too many."""
        await self._settler.begin(message)

    async def close(self, wait_s: float) -> None:
        """Take no more anchors, and give those at hand their time."""
        await self._settler.close(wait_s)

    async def _work(self, message: Message) -> None:
        event = message.event_of(AnchorCaptured)
        begun_s = asyncio.get_running_loop().time()
        outcome = await self._outcome(message, event)
        seconds = asyncio.get_running_loop().time() - begun_s
        await self._publish(event, outcome, seconds, message)
        settled(self._telemetry, event, outcome, message.time, self._now())

    async def _outcome(self, message: Message, event: AnchorCaptured) -> Stored | Lost:
        try:
            return await asyncio.to_thread(keep, self._store, event.circumstance)
        except BlobNotFound as error:
            age_s = (self._now() - message.time).total_seconds()
            if age_s < self._settings.anchor_absent_s_max:
                raise
            return Lost("blob_missing", str(error))

    async def _publish(
        self, captured: AnchorCaptured, outcome: Stored | Lost, seconds: float, message: Message
    ) -> None:
        fact = captured.fact
        about = {
            "session_id": fact.session_id,
            "position": fact.position,
            "anchor_id": fact.anchor_id,
        }
        replica = self._settings.anchor_replica
        told = AnchorOutcomeCircumstance(replica=replica, seconds=round(seconds, 6))
        event: Event
        if isinstance(outcome, Stored):
            stored = AnchorStoredFact(**about, blob=outcome.blob, size_bytes=outcome.size_bytes)
            event = AnchorStored(fact=stored, circumstance=told)
        else:
            log.warning(
                "anchor %d of session %s is lost: %s: %s",
                fact.position,
                fact.session_id,
                outcome.code,
                outcome.message,
            )
            told = told.model_copy(update={"message": outcome.message})
            event = AnchorLost(fact=AnchorLostFact(**about, code=outcome.code), circumstance=told)
        await self._send(event, captured, message)
        self.stored += isinstance(outcome, Stored)
        self.lost += isinstance(outcome, Lost)

    async def _send(self, event: Event, captured: AnchorCaptured, message: Message) -> None:
        session_id, position = captured.fact.session_id, captured.fact.position
        await self._bus.publish(
            event,
            session_id,
            source=f"{SOURCE}/{self._settings.anchor_replica}",
            time=self._now(),
            event_id=f"{session_id}.anchor_result.{position}.{message.sequence}",
            session_id=session_id,
            cause=keys.of(session_id, keys.anchor(position)),
            traceparent=message.envelope().traceparent,
        )
