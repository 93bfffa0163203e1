"""What becomes of one message of a durable: it is worked on, and then settled in one of four ways.

Done: acknowledged. Never to be done, now or after any retry: put aside as a dead letter, then
acknowledged. Of a newer version: left for one of its replicas. Anything else: delivered again,
later and later, for as long as it takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from dsec.platform.bus.connection import Bus
from dsec.platform.bus.errors import BadMessage
from dsec.platform.bus.message import Message
from dsec.platform.bus.settling import Signals, settle
from dsec_contracts import EnvelopeError, UnknownEvent

log = logging.getLogger(__name__)

CLOSED_RETRY_S = 1.0
SIGNALS_PER_ACK_WAIT = 2


class Later(Exception):
    """A message that cannot be settled now. `delay_s` is when to look again."""

    def __init__(self, delay_s: float, why: str) -> None:
        super().__init__(why)
        self.delay_s = delay_s


class Settler:
    """Has the messages of a durable worked on, and settles each."""

    def __init__(
        self,
        bus: Bus,
        consumer: str,
        work: Callable[[Message], Awaitable[None]],
        *,
        ack_wait_s: float,
        retry_s_min: float,
        retry_s_max: float,
        in_flight_max: int = 1,
    ) -> None:
        """Prepare; nothing is received by this.

        Args:
            consumer: the durable, for whoever reads its dead letters.
            work: on one message; what it raises says how the message is settled.
            ack_wait_s: of the durable; work that takes longer signals itself.
            retry_s_min: the first wait before a message is delivered again; waits double.
            retry_s_max: up to this.
            in_flight_max: how many messages `begin` has worked on at a time.
        """
        self._bus = bus
        self._consumer = consumer
        self._work = work
        self._signal_s = ack_wait_s / SIGNALS_PER_ACK_WAIT
        self._retry_s_min = retry_s_min
        self._retry_s_max = retry_s_max
        self._places = asyncio.Semaphore(in_flight_max)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.dead_letters = 0
        """Messages that were put aside."""

    async def handle(self, message: Message) -> None:
        """Have a message worked on, and settle it; never raises."""
        await self._settled(message, Signals(message, self._signal_s))

    async def begin(self, message: Message) -> None:
        """Have a message worked on beside others; never raises. Waits only while there are too
        many."""
        signals = Signals(message, self._signal_s)
        await self._places.acquire()
        if self._closed:  # perhaps only since it waits: nobody would give this one its time
            self._places.release()
            signals.cancel()
            await settle(message.nak(CLOSED_RETRY_S))
            return
        task = asyncio.create_task(self._settled(message, signals))
        self._tasks.add(task)
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._places.release()

    async def close(self, wait_s: float) -> None:
        """Begin with no more messages, and give those at hand their time."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=wait_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _settled(self, message: Message, signals: Signals) -> None:
        try:
            await self._work(message)
        except (BadMessage, EnvelopeError, ValidationError) as error:
            await self._put_aside(message, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the message comes again
            delay_s = self._retry_s(message, error)
            log.warning("message %d again in %.1f s: %r", message.sequence, delay_s, error)
            await settle(message.nak(delay_s))
        else:
            await settle(message.ack())
        finally:
            signals.cancel()

    def _retry_s(self, message: Message, error: Exception) -> float:
        if isinstance(error, UnknownEvent):
            # Of a newer version: one of its replicas takes it, or we after the upgrade.
            return self._retry_s_max
        if isinstance(error, Later):
            return error.delay_s
        doublings = min(message.delivered - 1, 30)
        return min(self._retry_s_max, self._retry_s_min * 2.0**doublings)

    async def _put_aside(self, message: Message, error: Exception) -> None:
        log.error("message %d is put aside: %s", message.sequence, error)
        try:
            await self._bus.dead_letter(message, self._consumer, str(error))
        except Exception as refused:  # noqa: BLE001 - not put aside: it must come again
            log.warning("and could not be put aside: %r", refused)
            await settle(message.nak(self._retry_s(message, error)))
        else:
            self.dead_letters += 1
            await settle(message.ack())
