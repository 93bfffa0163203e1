"""A service's FastStream application: handlers on durable consumers of the bus.

FastStream receives; publishing stays with `Bus`, which reads every acknowledgement. What was found
in FastStream and nats-py and settled here:

* The default acknowledgement policy terminates a message whose handler raised. Ours is manual: a
  handler acknowledges, or asks for the message again.
* `PullSub` with a batch size above 1, and `max_workers`, handle messages out of order. A batch of 1
  does one after the other, and nothing is taken from the server before the handler is free.
* A stop drops what was fetched and not begun, which then waits for `ack_wait`. So before it, the
  pull loop is parked: the handler at work ends, what a last fetch brings is handed back, and no
  other fetch is made.
* A handler's message would be decoded (a body that looks like JSON is parsed) and validated: that
  costs more than most handlers. Here it gets the bus's own `Message`.
* `pull_subscribe` binds to a durable that exists and would make one with other settings if it does
  not: so the durable is made by `Bus.consumer` first.
* On a closed connection the pull loop spins and never yields, before any callback says that it is
  closed. The client closes for good when the server refuses it (credentials, a protocol error). So
  the fetch is guarded: a closed connection ends the application, whose process starts anew.
* A fetch that fails at once (its durable was deleted) is repeated at once, thousands of times a
  second. The guard lets `FAILED_FETCH_S` pass.
* The broker's inbox prefix is not its subscribers': those are told it too.
* A pull loop can be alive and receive nothing for ever. `_watch` looks from outside: messages wait,
  and none has begun for `STALL_LIMIT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

# First, since it imports nats-py without what nobody needs of it.
from dsec.platform.bus import Bus, BusError, Consumer, Message, NotPermitted, nodes

# isort: split
import nats.errors
import nats.js.errors
from faststream import AckPolicy, FastStream
from faststream.message import StreamMessage
from faststream.nats import JStream, NatsBroker, PullSub
from faststream.nats.subscriber.usecases import PullStreamSubscriber
from nats.aio.msg import Msg

from dsec.platform.bus.refusals import Repeats, refusal
from dsec.platform.cancellation import cancelled
from dsec.platform.roles import inbox_prefix
from dsec_contracts import subjects

log = logging.getLogger(__name__)

FETCH_WAIT_S = 5.0
STALL_CHECK_S = 2.0
STALL_LIMIT_S = 15.0
FAILED_FETCH_S = 0.2
LAST_FETCH_S = 0.3
"""What is on its way when a stop begins arrives within this."""

Handler = Callable[[Message], Awaitable[None]]


class ConsumerStalled(BusError):
    """Messages wait and none is received: start anew."""


class ConnectionClosed(BusError):
    """The client gave its connection up: start anew."""


class ServiceApp:
    """One service's handlers, from the first fetch to a graceful stop."""

    def __init__(
        self, bus: Bus, nats_url: str, name: str, *, stop_s_max: float, ack_wait_s: float
    ) -> None:
        """Prepare; nothing is connected yet.

        Args:
            stop_s_max: how long a stop waits for the handlers at work. Longer than a handler
                takes, shorter than whoever stops the process is patient.
        """
        self._bus = bus
        self._stop_s_max = stop_s_max
        self._ack_wait_s = ack_wait_s
        self._consumers: list[Consumer] = []
        self._busy = 0
        self._begun_s = 0.0
        self._ended = asyncio.Event()
        self._closed = False
        self._refused: NotPermitted | None = None
        self._repeats = Repeats()
        self._stopping = False
        self._parked = asyncio.Event()
        self._release = asyncio.Event()
        self._subscribers: list[PullStreamSubscriber] = []
        self._inbox_prefix = inbox_prefix(nats_url)
        self.broker = NatsBroker(
            nodes(nats_url),
            name=name,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            connect_timeout=2,
            error_cb=self._on_error,
            inbox_prefix=self._inbox_prefix,
            closed_cb=self._on_closed,
            graceful_timeout=1,  # handlers have been waited for by then
            apply_types=False,
            logger=logging.getLogger("dsec.faststream"),
            log_level=logging.DEBUG,
        )
        self._app = FastStream(self.broker, logger=None)

    async def handle(self, durable: str, subject: str, handler: Handler) -> None:
        """Have `handler` called with every message of a durable, one after the other.

        The handler settles each message itself and does not raise.
        """
        consumer = await self._bus.consumer(durable, [subject], ack_wait_s=self._ack_wait_s)
        self._consumers.append(consumer)

        async def call(message: Message) -> None:
            if self._stopping:
                await message.nak(0)
            else:
                self._busy += 1
                self._begun_s = asyncio.get_running_loop().time()
                try:
                    await handler(message)
                finally:
                    self._busy -= 1
            if self._stopping:
                self._parked.set()
                await self._release.wait()

        subscribe = self.broker.subscriber(
            subject,
            durable=durable,
            stream=JStream(name=subjects.STREAM, declare=False),
            pull_sub=PullSub(batch_size=1, timeout=FETCH_WAIT_S),
            inbox_prefix=self._inbox_prefix.encode() + b".",
            ack_policy=AckPolicy.MANUAL,
            decoder=_wrapped,
        )
        subscribe(call)
        self._subscribers.append(subscribe)

    async def run(self, stop: asyncio.Event) -> None:
        """Handle messages until told to stop.

        Raises:
            ConnectionClosed, ConsumerStalled: only a new process helps.
            NotPermitted: the server refuses what a handler needs; a new process tries again.
        """
        loop = asyncio.get_running_loop()
        self._begun_s = loop.time()
        await self._app.start()
        for subscriber in self._subscribers:
            self._guard(subscriber)
        ended = asyncio.create_task(self._ended.wait())
        stopped = asyncio.create_task(stop.wait())
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({ended, stopped, watch}, return_when=asyncio.FIRST_COMPLETED)
            if self._closed:
                raise ConnectionClosed("the connection to the bus was closed")
            if self._refused is not None:
                raise self._refused
            if watch.done():
                watch.result()
        finally:
            for task in (ended, stopped, watch):
                task.cancel()
            if not self._closed:
                await self._stop()

    async def run_beside(
        self, close: Callable[[float], Awaitable[None]], stop: asyncio.Event
    ) -> None:
        """`run` for handlers that only begin with a message: what is at hand when told to stop ends
        first, while there is a connection to settle it on.

        Args:
            close: `Settler.close`.
        """
        closed = asyncio.Event()

        async def close_first() -> None:
            await stop.wait()
            await close(self._stop_s_max)
            closed.set()

        closing = asyncio.create_task(close_first())
        try:
            await self.run(closed)
        finally:
            closing.cancel()
            await close(0)

    async def _stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(TimeoutError):  # it is stopped all the same
            patience_s = self._stop_s_max if self._busy else LAST_FETCH_S
            await asyncio.wait_for(self._parked.wait(), patience_s)
        for subscriber in self._subscribers:
            subscriber.running = False  # before the loop is released: it fetches no more
        self._release.set()
        async with asyncio.timeout(self._stop_s_max):
            await self._app.stop()

    async def _watch(self) -> None:
        """Return never, but by raising."""
        loop = asyncio.get_running_loop()
        while not cancelled():
            await asyncio.sleep(STALL_CHECK_S)
            idle_s = loop.time() - self._begun_s
            if self._busy or idle_s < STALL_LIMIT_S or not self._bus.connected:
                continue
            for consumer in self._consumers:
                if await self._pending(consumer):
                    raise ConsumerStalled(f"{consumer.name}: nothing received for {idle_s:.0f} s")

    async def _pending(self, consumer: Consumer) -> int:
        try:
            return (await consumer.state()).pending
        except nats.js.errors.NotFoundError as error:
            raise ConsumerStalled(f"{consumer.name} is gone") from error
        except (nats.errors.Error, TimeoutError):
            return 0  # the bus is away; the client is connecting

    def _guard(self, subscriber: PullStreamSubscriber) -> None:
        subscription: Any = subscriber.subscription
        fetch = subscription.fetch
        loop = asyncio.get_running_loop()

        async def guarded(batch: int, timeout: float) -> list[Msg]:
            begun_s = loop.time()
            try:
                found: list[Msg] = await fetch(batch, timeout)
            except nats.errors.ConnectionClosedError:
                subscriber.running = False
                await self._on_closed()
                return []
            except Exception:
                if loop.time() - begun_s < FAILED_FETCH_S:
                    await asyncio.sleep(FAILED_FETCH_S)
                raise
            return found

        subscription.fetch = guarded

    async def _on_error(self, error: Exception) -> None:
        refused = refusal(error)
        if refused is None:
            if self._repeats.is_new(repr(error), asyncio.get_running_loop().time()):
                log.warning("bus: %r", error)
        else:
            self._refused = refused
            self._ended.set()

    async def _on_closed(self) -> None:
        self._closed = True
        self._ended.set()


async def _wrapped(message: StreamMessage[Msg]) -> Message:
    return Message.wrap(message.raw_message)
