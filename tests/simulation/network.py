"""The client of the bus, and the network between it and the server.

`Client` stands in the place of nats-py's: the services' own `Bus`, with its retries, refusals,
consumers, leases and messages, runs on top of it unchanged. A request travels, is answered, and
the answer travels; either may be lost, late or, for publishes, come twice. Before a request leaves
and after it was carried out is where a process can be made to die.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import nats.errors
import nats.js.errors
from nats.js import api
from tests.simulation.clock import PROCESS, Process, VirtualLoop
from tests.simulation.stream import MAX_PAYLOAD_BYTES, Pull, Server, Stored, matches

from dsec_contracts import subjects

FLUSH_S = 0.001


@dataclass(slots=True)
class Weather:
    """What the network does, drawn from the seed."""

    delay_s_max: float = 0.002
    slow_share: float = 0.0
    slow_s_max: float = 0.0
    lost_share: float = 0.0
    doubled_share: float = 0.0
    ordered: bool = True
    """Whether requests of one connection arrive in the order in which they were made. What a
    server sends over one connection always does: the connection is TCP."""
    until_s: float = 0.0
    """Later it is calm: delays are short, and nothing gets lost."""


Trace = Callable[[str], None]
Boundary = Callable[[Process, str, str], bool]
"""Told of each request of a process: operation, and `before` or `after`. True: the process died."""


@dataclass(slots=True)
class Network:
    """Between all clients and the server."""

    loop: VirtualLoop
    server: Server
    chance: random.Random
    weather: Weather
    trace: Trace
    boundary: Boundary
    clients: list[Client] = field(default_factory=list)

    @property
    def calm(self) -> bool:
        """Whether nothing out of the ordinary happens any more."""
        return self.loop.time() >= self.weather.until_s

    def delay_s(self) -> float:
        """How long a message travels now."""
        weather, chance = self.weather, self.chance
        if self.calm:
            return chance.uniform(0.0001, 0.002)
        if weather.slow_share and chance.random() < weather.slow_share:
            return chance.uniform(0, weather.slow_s_max)
        return chance.uniform(0.0001, weather.delay_s_max)

    def lost(self) -> bool:
        """Whether a message gets lost now."""
        return self.server.away or (
            not self.calm
            and self.weather.lost_share > 0
            and self.chance.random() < self.weather.lost_share
        )

    def doubled(self) -> bool:
        """Whether a publish arrives twice."""
        share = self.weather.doubled_share
        return share > 0 and not self.calm and self.chance.random() < share

    def client(self, process: Process) -> Client:
        """A new connection of a process."""
        client = Client(self, process)
        self.clients.append(client)
        process.on_death.append(client.break_off)
        return client

    def tell(self, subject: str, headers: dict[str, str], data: bytes) -> None:
        """Carry a transient message to all who listen."""
        for client in list(self.clients):
            client.hear(subject, headers, data)


class _Way:
    """One direction of one connection."""

    def __init__(self, network: Network, *, ordered: bool) -> None:
        self._network = network
        self._ordered = ordered
        self._last_s = 0.0

    def send(self, call: Callable[..., object], *arguments: Any, delay_s: float | None = None):
        """Have something happen at the other end."""
        network = self._network
        if network.lost():
            return
        at_s = network.loop.time() + (network.delay_s() if delay_s is None else delay_s)
        if self._ordered:
            at_s = self._last_s = max(at_s, self._last_s + 1e-6)
        network.loop.later(at_s - network.loop.time(), call, *arguments)


class Client:
    """A connection of one process, in the shape of `nats.aio.client.Client`."""

    max_payload = MAX_PAYLOAD_BYTES

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.broken = False
        self.out = _Way(network, ordered=network.weather.ordered)
        self.back = _Way(network, ordered=True)
        self._listeners: list[tuple[str, Callable[[Any], Awaitable[None]]]] = []

    def break_off(self) -> None:
        """The process is gone: nothing is sent, and nothing is heard."""
        self.broken = True
        if self in self.network.clients:
            self.network.clients.remove(self)

    @property
    def is_connected(self) -> bool:
        """Whether the server is there."""
        return not self.network.server.away

    def jetstream(self, timeout: float = 5.0) -> JetStream:
        """The JetStream half."""
        return JetStream(self, timeout)

    async def flush(self) -> None:
        """All is sent at once here."""

    async def close(self) -> None:
        """End the connection."""
        self.break_off()

    # -- requests ------------------------------------------------------------------------------

    async def ask(
        self, what: str, call: Callable[[], Any], timeout_s: float, *, doubles: bool = False
    ) -> Any:
        """Have the server do something, and wait for its answer.

        Raises:
            nats.errors.TimeoutError: no answer came.
        """
        network, loop = self.network, self.network.loop
        if self.broken or network.boundary(self.process, what, "before"):
            await loop.create_future()  # whoever is dead waits for ever
        answer: asyncio.Future[Any] = loop.create_future()

        def answered(value: Any) -> None:
            if not answer.done():
                answer.set_result(value)

        def arrived() -> None:
            try:
                value = call()
            except nats.errors.Error as error:
                value = error
            if not self.broken and not network.boundary(self.process, what, "after"):
                self.back.send(answered, value)

        self.out.send(arrived)
        if doubles and network.doubled():
            loop.later(network.delay_s() + network.weather.delay_s_max, arrived)
        try:
            async with asyncio.timeout(timeout_s):
                value = await answer
        except TimeoutError:
            network.trace(f"{self.process}: no answer to {what}")
            raise nats.errors.TimeoutError from None
        if isinstance(value, Exception):
            raise value
        return value

    def say(self, what: str, call: Callable[..., object], *arguments: Any) -> None:
        """Tell the server something that it does not answer."""
        network = self.network
        if self.broken or network.boundary(self.process, what, "before"):
            return

        def arrived() -> None:
            call(*arguments)
            network.boundary(self.process, what, "after")

        self.out.send(arrived)

    async def request(self, subject: str, data: bytes, timeout: float) -> SimpleNamespace:
        """The two calls of the JetStream API that the services make by themselves."""
        server = self.network.server

        def answer() -> dict[str, Any]:
            if subject.startswith("$JS.API.STREAM.INFO."):
                return server.state()
            stored = server.messages.get(json.loads(data)["seq"])
            if stored is None:
                return {"error": {"code": 404, "err_code": 10037, "description": "no message"}}
            whole, part = divmod(stored.time_ns, 1_000_000_000)
            text = _utc(whole)
            return {"message": {"time": f"{text}.{part:09d}Z"}}

        found = await self.ask(subject.split(".")[3].lower(), answer, timeout)
        return SimpleNamespace(data=json.dumps(found).encode())

    # -- transient messages --------------------------------------------------------------------

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        """Tell all who listen."""
        if self.network.loop.time() >= self.process.mute_until_s:
            self.say("tell", self.network.tell, subject, headers, data)

    async def subscribe(self, subject: str, cb: Callable[[Any], Awaitable[None]]) -> None:
        """Listen."""
        self._listeners.append((subject, cb))

    def hear(self, subject: str, headers: dict[str, str], data: bytes) -> None:
        """Something was told to all."""
        for pattern, callback in self._listeners:
            if matches(subject, pattern):
                self.back.send(self._heard, callback, subject, headers, data)

    def _heard(self, callback: Any, subject: str, headers: dict[str, str], data: bytes) -> None:
        if not self.broken:
            message = SimpleNamespace(subject=subject, headers=headers, data=data)
            self.network.loop.spawn(self.process, callback(message))


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
    """A key-value bucket of which one key is used."""

    def __init__(self, client: Client, name: str, ttl_s: float, timeout_s: float) -> None:
        self._client = client
        self._name = name
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s

    async def create(self, key: str, value: bytes) -> int:
        """Write the key if there is none."""
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write the key if its revision is `last`."""
        server = self._client.network.server
        return await self._client.ask(  # type: ignore[no-any-return]
            "lease", lambda: server.lease(self._name, value, last, self._ttl_s), self._timeout_s
        )

    async def delete(self, key: str, last: int) -> None:
        """Delete the key if its revision is `last`."""
        server = self._client.network.server
        await self._client.ask("free", lambda: server.free(self._name, last), self._timeout_s)


def _utc(seconds: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def subject_of_fence(subject: str) -> bool:
    """Whether a message is a fence."""
    return subject.startswith(f"{subjects.FENCE}.")


__all__ = ["PROCESS", "Boundary", "Client", "Network", "Weather"]
