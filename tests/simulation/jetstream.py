"""The JetStream half of the client: publishes, durables and their messages, leases."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import nats.errors
import nats.js.errors
from nats.js import api
from tests.simulation.consumers import Pull, Stored
from tests.simulation.stream import Server

if TYPE_CHECKING:
    from tests.simulation.bus import Client


class Delivery:
    """A raw message, in the shape of `nats.aio.msg.Msg`."""

    def __init__(self, subscription: Subscription, stored: Stored, reply: str) -> None:
        self.subject, self.headers, self.data = stored.subject, stored.headers, stored.data
        self.reply = reply
        self._subscription = subscription
        self._sequence = stored.sequence

    async def ack(self) -> None:
        """Done."""
        self._settle("ack")

    async def nak(self, delay: float = 0.0) -> None:
        """Again, after `delay` seconds."""
        self._settle("nak", delay)

    async def in_progress(self) -> None:
        """Still at it."""
        self._settle("in_progress")

    async def term(self) -> None:
        """Never again."""
        self._settle("term")

    def _settle(self, how: str, delay_s: float = 0.0) -> None:
        name, client = self._subscription.name, self._subscription.client

        def arrived() -> None:
            # By the name: it may settle what a consumer of the same name has given to another.
            consumer = client.network.server.consumers.get(name)
            if consumer is not None:
                consumer.settle(self._sequence, how, delay_s)

        client.say(how, arrived)


class Subscription:
    """A pull subscription."""

    def __init__(self, client: Client, name: str, timeout_s: float) -> None:
        self.client = client
        self.name = name
        self._timeout_s = timeout_s
        self._arrived: deque[Delivery] = deque()

    async def fetch(self, batch: int, timeout: float) -> list[Delivery]:
        """Up to `batch` messages: those there are, or the first that come until `timeout`.

        Raises:
            nats.errors.TimeoutError: none came.
        """
        network, loop = self.client.network, self.client.network.loop
        if self.client.broken:
            await loop.create_future()
        if self._arrived:
            return self._taken(batch)
        until_s = loop.time() + timeout
        ended: asyncio.Future[bool] = loop.create_future()

        def send(stored: Stored, reply: str) -> None:
            self.client.back.send(self._arrived.append, Delivery(self, stored, reply))

        def alive() -> bool:
            # A server goes on sending to a client that is stopped, until the time is over.
            return loop.time() < until_s and not self.client.broken

        def say(value: bool) -> None:
            if not ended.done():
                ended.set_result(value)

        def asked() -> None:
            consumer = network.server.consumers.get(self.name)
            if consumer is None:
                self.client.back.send(say, False)
            else:
                consumer.pull(Pull(batch, send, alive, lambda: self.client.back.send(say, True)))

        self.client.say("pull", asked)
        try:
            async with asyncio.timeout_at(until_s):
                found = await ended
        except TimeoutError:
            found = True
        if not found:
            raise nats.js.errors.ServiceUnavailableError(503, "no responders")
        if not self._arrived:
            raise nats.errors.TimeoutError
        return self._taken(batch)

    def _taken(self, batch: int) -> list[Delivery]:
        return [self._arrived.popleft() for _ in range(min(batch, len(self._arrived)))]

    async def consumer_info(self) -> api.ConsumerInfo:
        """Where the durable stands."""
        server = self.client.network.server
        return await self.client.ask(  # type: ignore[no-any-return]
            "consumer_info", lambda: server.consumer(self.name).info(), self._timeout_s
        )

    async def unsubscribe(self) -> None:
        """Hear no more."""


class JetStream:
    """In the shape of `nats.js.JetStreamContext`."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    @property
    def _server(self) -> Server:
        return self._client.network.server

    async def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        return await self._client.ask(what, call, self._timeout_s)

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> Any:
        """Publish, and read the acknowledgement."""
        network, process = self._client.network, self._client.process
        kept = dict(headers)

        def store() -> SimpleNamespace:
            try:
                sequence, known = self._server.publish(subject, kept, data)
            except nats.js.errors.APIError as error:
                network.trace(f"{process}: {subject} refused: {error.description}")
                raise
            network.trace(f"{process}: {subject} at {sequence}{' again' if known else ''}")
            return SimpleNamespace(seq=sequence)

        what = f"publish {subject.rpartition('.')[0]}"
        return await self._client.ask(what, store, self._timeout_s, doubles=True)

    async def add_stream(self, config: Any) -> None:
        """It is there."""
        await self._ask("add_stream", lambda: None)

    async def get_last_msg(self, stream: str, subject: str) -> SimpleNamespace:
        """The last message of a subject."""

        def find() -> SimpleNamespace:
            sequence = self._server.last_of(subject)
            if not sequence:
                raise nats.js.errors.NotFoundError(404, "no message found", 10037)
            return SimpleNamespace(seq=sequence)

        return await self._ask("last", find)  # type: ignore[no-any-return]

    async def purge_stream(self, stream: str, subject: str, seq: int) -> None:
        """Remove messages of a filter below a sequence."""
        await self._ask("purge", lambda: self._server.purge(subject, seq))

    async def consumer_info(self, stream: str, name: str) -> api.ConsumerInfo:
        """Where a durable stands."""
        return await self._ask(  # type: ignore[no-any-return]
            "consumer_info", lambda: self._server.consumer(name).info()
        )

    async def consumers_info(self, stream: str, offset: int = 0) -> list[api.ConsumerInfo]:
        """Where all stand."""
        return await self._ask(  # type: ignore[no-any-return]
            "consumers_info",
            lambda: [c.info() for c in self._server.consumers.values()][offset:],
        )

    async def add_consumer(self, stream: str, config: api.ConsumerConfig) -> None:
        """Make a durable."""
        await self._ask("add_consumer", lambda: self._server.add_consumer(config))

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Remove a durable."""
        await self._ask("delete_consumer", lambda: self._server.delete_consumer(name))

    async def pull_subscribe_bind(self, name: str, stream: str) -> Subscription:
        """A subscription to a durable."""
        return Subscription(self._client, name, self._timeout_s)

    async def create_key_value(self, config: api.KeyValueConfig) -> Bucket:
        """A bucket, made if need be."""
        await self._ask("bucket", lambda: None)
        return Bucket(self._client, str(config.bucket), float(config.ttl or 0), self._timeout_s)


class Bucket:
    """A key-value bucket."""

    def __init__(self, client: Client, name: str, ttl_s: float, timeout_s: float) -> None:
        self._client = client
        self._name = name
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s

    async def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        return await self._client.ask(what, call, self._timeout_s)

    async def get(self, key: str) -> SimpleNamespace:
        """What a key has."""
        server = self._client.network.server
        revision, value = await self._ask("value", lambda: server.value(self._name, key))
        return SimpleNamespace(revision=revision, value=value)

    async def create(self, key: str, value: bytes) -> int:
        """Write the key if there is none."""
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write the key if its revision is `last`."""
        server = self._client.network.server
        return await self._ask(  # type: ignore[no-any-return]
            "change", lambda: server.change(self._name, key, value, last, self._ttl_s)
        )

    async def delete(self, key: str, last: int) -> None:
        """Delete the key if its revision is `last`."""
        server = self._client.network.server
        await self._ask("free", lambda: server.free(self._name, key, last))
