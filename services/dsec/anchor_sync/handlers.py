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
from dsec.platform.bus import BadMessage, Bus, Message, Signals, settle
from dsec.platform.objects import BlobNotFound, ObjectStore
from dsec.platform.telemetry import OFF, Telemetry
from dsec_contracts import (
    AnchorCaptured,
    AnchorLost,
    AnchorStored,
    EnvelopeError,
    Event,
    UnknownEvent,
    keys,
)
from dsec_contracts.anchor import AnchorLostFact, AnchorOutcomeCircumstance, AnchorStoredFact

log = logging.getLogger(__name__)

CONSUMER = "anchor-sync"
SOURCE = "dsec/anchor-sync"
CLOSED_RETRY_S = 1.0


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
        self._places = asyncio.Semaphore(settings.anchors_in_flight_max)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.stored = 0
        self.lost = 0

    async def on_anchor_captured(self, message: Message) -> None:
        """Begin to work on an anchor; never raises. Waits only while there are too many."""
        if self._closed:
            await settle(message.nak(CLOSED_RETRY_S))
            return
        signals = Signals(message, self._settings.anchor_ack_wait_s / 2)
        await self._places.acquire()
        task = asyncio.create_task(self._work(message, signals))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, wait_s: float) -> None:
        """Take no more anchors, and give those at hand their time."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=wait_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, message: Message, signals: Signals) -> None:
        try:
            event = message.event()
            if not isinstance(event, AnchorCaptured):
                raise BadMessage(f"{type(event).__name__} on {message.subject}")
            begun_s = asyncio.get_running_loop().time()
            outcome = await self._outcome(message, event)
            seconds = asyncio.get_running_loop().time() - begun_s
            await self._publish(event, outcome, seconds, message)
            settled(self._telemetry, event, outcome, message.time, self._now())
        except (BadMessage, EnvelopeError) as error:
            await self._put_aside(message, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the message comes again
            delay_s = self._retry_s(message, error)
            log.warning("anchor at %d again in %.1f s: %s", message.sequence, delay_s, error)
            await settle(message.nak(delay_s))
        else:
            await settle(message.ack())
        finally:
            signals.cancel()
            self._places.release()

    async def _outcome(self, message: Message, event: AnchorCaptured) -> Stored | Lost:
        try:
            return await asyncio.to_thread(keep, self._store, event.circumstance)
        except BlobNotFound as error:
            age_s = (self._now() - message.time).total_seconds()
            if age_s < self._settings.anchor_absent_s_max:
                raise
            return Lost("blob_missing", str(error))

    def _retry_s(self, message: Message, error: BaseException) -> float:
        most = self._settings.anchor_retry_s_max
        if isinstance(error, UnknownEvent):  # of a newer version: one of its replicas takes it
            return most
        first = self._settings.anchor_retry_s_min
        return float(min(most, first * 2 ** min(message.delivered - 1, 30)))

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

    async def _put_aside(self, message: Message, error: BaseException) -> None:
        log.error("anchor at %d is put aside: %s", message.sequence, error)
        try:
            await self._bus.dead_letter(message, CONSUMER, str(error))
        except Exception as refused:  # noqa: BLE001 - not put aside: it must come again
            log.warning("and could not be put aside: %r", refused)
            await settle(message.nak(self._retry_s(message, error)))
        else:
            await settle(message.ack())
