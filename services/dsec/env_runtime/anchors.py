"""The anchors of a lane, on their way to the log.

A small blob travels in the event: one message, no object store in a worker's way, and one that is
away holds up nobody. A large one does not fit a message, and would fill the stream if it did: the
worker puts it into the object store, patiently, before it publishes the event, which then names it.
Either way anchor-sync is who says that it is stored.

Lanes do not wait for any of that. What is captured waits here, at most `HELD_BYTES_MAX` of it;
beyond that the lane takes no steps. The anchors of one session are published in their order and
before its end, so where the log has one it has all those before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from dsec.env_runtime.ends import UNPUBLISHABLE
from dsec.env_runtime.seats import Seat
from dsec.platform.bus import Bus, PublishRefused, TooLarge
from dsec.platform.cancellation import cancelled
from dsec.platform.clock import utc_now
from dsec.platform.objects import ObjectStore, ObjectStoreError, put_patiently
from dsec.session.anchor_record import Frozen, captured_fact, frozen
from dsec.session.anchors import Taken
from dsec_contracts import AnchorCaptured, keys
from dsec_contracts.anchor import AnchorCapturedCircumstance

log = logging.getLogger(__name__)

INLINE_BYTES_MAX = 128 << 10
"""Of a blob that travels in the event."""
HELD_BYTES_MAX = 128 << 20
"""Of blobs that wait to be published, a lane."""
PUBLISHES_IN_FLIGHT_MAX = 64


class _Waiting(NamedTuple):
    seat: Seat
    anchor: Frozen


class Outbox:
    """Anchors that wait to be published. See the module's text."""

    def __init__(
        self,
        bus: Bus,
        objects: ObjectStore | None,
        lane: str,
        worker: str,
        on_published: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._objects = objects
        self._lane = lane
        self._worker = worker
        self._on_published = on_published
        self._waiting: dict[bytes, deque[_Waiting]] = {}
        self._at_work: set[bytes] = set()
        """Sessions whose anchors are being published."""
        self._places = asyncio.Semaphore(PUBLISHES_IN_FLIGHT_MAX)
        self._held_bytes = 0
        self._gave_up = False
        """The object store was away for as long as it is waited for. Until it takes a blob, each
        is offered once: a session's end waits for its anchors, and may have a thousand."""
        self._some = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.fresh: list[_Waiting] = []
        """Taken with steps that are not published yet."""

    @property
    def full(self) -> bool:
        """Whether no more is to be captured for now."""
        return self._held_bytes > HELD_BYTES_MAX

    def take(self, seat: Seat, taken: Taken) -> None:
        """Capture an anchor while it is being taken."""
        self.add(seat, frozen(taken))

    def add(self, seat: Seat, anchor: Frozen) -> None:
        """Keep an anchor until `release`."""
        seat.anchors_waiting += 1
        self.fresh.append(_Waiting(seat, anchor))

    def release(self) -> None:
        """The steps before the anchors are published: these may be, too."""
        fresh, self.fresh = self.fresh, []
        for one in fresh:
            ended = one.seat.machine.ended
            if ended is not None and ended.code == UNPUBLISHABLE:
                one.seat.anchors_waiting -= 1  # its step did not happen
                continue
            self._held_bytes += len(one.anchor.blob)
            self._waiting.setdefault(one.seat.raw_id, deque()).append(one)
        if self._waiting:
            self._idle.clear()
            self._some.set()

    async def flushed(self) -> None:
        """Wait until all that was released is published."""
        await self._idle.wait()

    async def run(self) -> None:
        """Publish for ever.

        Raises:
            PublishRefused: the worker was fenced.
        """
        try:
            async with asyncio.TaskGroup() as group:
                while not cancelled():
                    await self._some.wait()
                    self._some.clear()
                    for raw_id in self._waiting.keys() - self._at_work:
                        self._at_work.add(raw_id)
                        group.create_task(self._publish_all(raw_id))
        except* PublishRefused as refused:
            raise refused.exceptions[0] from None

    async def _publish_all(self, raw_id: bytes) -> None:
        """The anchors of one session, one after the other. Whoever waits for the object store
        holds up no other session."""
        waiting = self._waiting[raw_id]
        while waiting:
            seat, anchor = waiting[0]
            await self.publish(seat, anchor)
            waiting.popleft()
            seat.anchors_waiting -= 1
            self._held_bytes -= len(anchor.blob)
        del self._waiting[raw_id]
        self._at_work.discard(raw_id)
        if not self._waiting:
            self._idle.set()
        self._on_published()

    async def publish(self, seat: Seat, anchor: Frozen) -> None:
        """Publish one anchor, its blob in the event or in the object store before it."""
        if anchor.error and not seat.told_of_anchors:
            seat.told_of_anchors = True  # the others say the same, as often as there are anchors
            log.warning(
                "session %s, anchor %d: %s. A restart re-executes from the anchor before it, or "
                "from step 0",
                seat.placed.session_id,
                anchor.taken.position,
                anchor.error,
            )
        if not anchor.blob:
            await self._send(seat, anchor, AnchorCapturedCircumstance(error=anchor.error))
            return
        told = AnchorCapturedCircumstance(
            blob=hashlib.sha256(anchor.blob).hexdigest(), size_bytes=len(anchor.blob)
        )
        if len(anchor.blob) <= INLINE_BYTES_MAX:
            try:
                inline = told.model_copy(update={"data": anchor.blob})
                await self._send(seat, anchor, inline)
            except TooLarge:  # for this server
                log.debug("an anchor of %d bytes fits no message", len(anchor.blob))
            else:
                return
        await self._send(seat, anchor, await self._put(anchor.blob, told))

    async def _put(
        self, blob: bytes, told: AnchorCapturedCircumstance
    ) -> AnchorCapturedCircumstance:
        if self._objects is None:
            error = f"{len(blob)} bytes fit no message, and there is no object store"
            return AnchorCapturedCircumstance(error=error)
        try:
            if self._gave_up:
                await asyncio.to_thread(self._objects.put, blob)
            else:
                await put_patiently(self._objects, blob)
        except ObjectStoreError as error:
            self._gave_up = True
            return AnchorCapturedCircumstance(error=str(error))
        self._gave_up = False
        return told

    async def _send(self, seat: Seat, anchor: Frozen, told: AnchorCapturedCircumstance) -> None:
        session_id, attempt = seat.placed.session_id, seat.placed.attempt
        position = anchor.taken.position
        who = {"worker": self._worker, "lane": self._lane, "attempt": attempt}
        async with self._places:
            await self._bus.publish(
                AnchorCaptured(
                    fact=captured_fact(session_id, anchor.taken),
                    circumstance=told.model_copy(update=who),
                ),
                session_id,
                source=f"dsec/env-runtime/{self._worker}",
                time=utc_now(),
                event_id=f"{session_id}.anchor.{position}.{attempt}",
                session_id=session_id,
                cause=keys.of(session_id, keys.step(position - 1)),
                fence=self._worker,
            )
