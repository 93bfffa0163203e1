"""What the recorder does to the bus: its durable consumer, read ahead and checked for gaps.

With the ack policy `all`, acknowledging a message acknowledges every one before it. So a delivery
that got lost between server and client must be noticed before the next one is committed: the
server numbers its deliveries, and a number left out means that the consumer is made anew at the
floor. That also makes the log, not the consumer, what says where to go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from dsec.platform.bus import Bus, Consumer, Message
from dsec.platform.cancellation import cancelled
from dsec.recorder.intake import Reading, read
from dsec.recorder.settings import RecorderSettings
from dsec.recorder.writer import Floor
from dsec_contracts import subjects

log = logging.getLogger(__name__)

CONSUMER = "recorder"
FILTERS = [
    subject
    for subject in subjects.STREAM_SUBJECTS
    if not subject.startswith((subjects.FENCE, subjects.DEAD_LETTER))
]
RECONNECT_POLL_S = 0.1


class DeliveryGap(Exception):
    """Deliveries got lost, or stopped: the consumer has to be made anew."""


class StreamSetBack(Exception):
    """The stream no longer holds what the log has of it: a new epoch begins."""


@dataclass(frozen=True, slots=True)
class Item:
    """A message and what it turned out to be."""

    message: Message
    reading: Reading


class Feed:
    """Messages after a floor, in order, each once, however often they are delivered."""

    def __init__(
        self, bus: Bus, consumer: Consumer, floor: Floor, settings: RecorderSettings
    ) -> None:
        self._bus = bus
        self._consumer = consumer
        self._floor = floor
        self._settings = settings
        self._last = floor.sequence
        self._ordinal = 0
        self.pause_s = settings.pause_s(0)
        """Between two commits, as things are: what comes within it need not be fetched apart."""
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._pump = asyncio.create_task(self._run())

    @classmethod
    async def open(cls, bus: Bus, floor: Floor, settings: RecorderSettings) -> Self:
        """Make the consumer anew after the floor.

        Raises:
            StreamSetBack: the stream no longer is the one that the log has.
        """
        await bus.delete_consumer(CONSUMER)
        consumer = await bus.consumer(
            CONSUMER,
            FILTERS,
            start_sequence=floor.sequence + 1,
            ack="all",
            ack_wait_s=settings.ack_wait_s,
            max_ack_pending=settings.ack_pending_max,
        )
        # Only now: a stream that is set back after this takes the consumer with it, or shows in
        # what that delivers.
        await check_floor(bus, floor)
        return cls(bus, consumer, floor, settings)

    async def close(self) -> None:
        """Stop reading. What was read and not committed comes again to whoever goes on."""
        self._pump.cancel()
        await asyncio.wait([self._pump])
        await self._consumer.close()

    async def next(self) -> list[Item]:
        """The next batch: what has arrived, within its bounds; empty when nothing has.

        Raises:
            DeliveryGap, StreamSetBack: nothing can be read on.
        """
        if not self._items:
            waiter = asyncio.ensure_future(self._arrived.wait())
            await asyncio.wait(
                [waiter, self._pump],
                timeout=self._settings.fetch_wait_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            waiter.cancel()
        if not self._items and self._pump.done():
            self._pump.result()
        batch: list[Item] = []
        size = 0
        while self._items and len(batch) < self._settings.batch_messages_max:
            item_bytes = len(self._items[0].message.data)
            if batch and size + item_bytes > self._settings.batch_bytes_max:
                break
            size += item_bytes
            batch.append(self._items.popleft())
        self._bytes -= size
        self._arrived.clear()
        self._taken.set()
        return batch

    async def _run(self) -> None:
        """Fetch ahead of the writer, by no more than one batch."""
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        count = self._settings.batch_messages_max
        while not cancelled():
            while self._full():
                self._taken.clear()
                await self._taken.wait()
            messages = await self._fetch(count)
            if messages:
                heard_at = loop.time()
                mean_bytes = sum(len(m.data) for m in messages) / len(messages)
                count = self._fetch_count(mean_bytes)
                for message in messages:
                    self._take(message)
                if self._items:
                    self._arrived.set()
                if len(messages) < count:
                    # Nothing is behind: what comes until the next commit is fetched at once.
                    await asyncio.sleep(self.pause_s / 2)
            elif loop.time() - heard_at > self._settings.stall_limit_s:
                await self._check_alive()
                heard_at = loop.time()

    def _full(self) -> bool:
        return (
            len(self._items) >= self._settings.batch_messages_max
            or self._bytes >= self._settings.batch_bytes_max
        )

    def _fetch_count(self, mean_bytes: float) -> int:
        fitting = int(self._settings.batch_bytes_max / max(mean_bytes, 1))
        return max(1, min(self._settings.batch_messages_max, fitting))

    async def _fetch(self, count: int) -> list[Message]:
        while not self._bus.connected:  # noqa: ASYNC110 - the client sets no event for it
            await asyncio.sleep(RECONNECT_POLL_S)
        return await self._consumer.fetch(count, self._settings.fetch_wait_s)

    def _take(self, message: Message) -> None:
        self._ordinal += 1
        if message.consumer_sequence != self._ordinal:
            raise DeliveryGap(
                f"delivery {message.consumer_sequence} came where {self._ordinal} was due"
            )
        if message.sequence <= self._last:
            if message.delivered == 1:
                # Passing it over would lose it, if the stream was set back and has gone on.
                raise DeliveryGap(f"{message.sequence} came first after {self._last}")
            return  # delivered again: committed, or held already
        self._last = message.sequence
        self._items.append(Item(message, read(message, self._floor.epoch)))
        self._bytes += len(message.data)

    async def _check_alive(self) -> None:
        """Nothing came for a while: is there nothing, or does nothing come any more?"""
        stream = await self._bus.stream_state()
        if stream.created != self._floor.stream_created or stream.last_sequence < self._last:
            raise StreamSetBack(f"the stream ends at {stream.last_sequence}, read to {self._last}")
        state = await self._consumer.state()
        if state.pending > 0 and not self._items:
            raise DeliveryGap(f"{state.pending} messages are pending and none comes")


async def check_floor(bus: Bus, floor: Floor) -> None:
    """Compare the message at the floor with what the log says of it.

    A stream that was restored to an older state, or lost its tail with the power, and then went on
    is as long as before and has other messages: the one at the floor came in at another time. It
    is looked up by its sequence, since it need not be one that we consume: a fence can stand there.
    That there is none proves nothing, because we trim what is logged ourselves. A stream that went
    on after it was set back does have one, as nothing is trimmed before this was asked.

    Raises:
        StreamSetBack: it is another message.
    """
    if floor.message_time is None:
        return
    found = await bus.message_time(floor.sequence)
    if found is not None and found != floor.message_time:
        raise StreamSetBack(
            f"the message at {floor.sequence} is of {found}, not of {floor.message_time}"
        )


async def settle_epoch(bus: Bus, floor: Floor | None, *, set_back: bool) -> tuple[Floor, bool]:
    """The floor to go on from, and whether it begins a new epoch.

    A new epoch reads the stream from its first message: natural keys see to it that what the log
    has already is not written twice.
    """
    stream = await bus.stream_state()
    if floor is None:
        return Floor(1, stream.created, 0, None), True
    if set_back or stream.created != floor.stream_created or stream.last_sequence < floor.sequence:
        return Floor(floor.epoch + 1, stream.created, 0, None), True
    return floor, False


async def dead_letter(bus: Bus, message: Message, error: str) -> None:
    """Put a message aside for people."""
    log.error("dead letter: %s at %d: %s", message.subject, message.sequence, error)
    await bus.dead_letter(message, CONSUMER, error)


def message_of_parked(sequence: int, subject: str, headers: dict[str, str], body: bytes) -> Message:
    """A parked message as it was when it came."""
    raw: Any = None  # nothing to acknowledge: it was, when it was parked
    return Message(subject, headers, body, sequence, 1, datetime.min, raw)
