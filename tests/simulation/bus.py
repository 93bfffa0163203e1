"""The client of the bus, in the place of nats-py's.

The services' own `Bus`, with its retries, refusals, consumers, leases and messages, runs on top of
it unchanged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import nats.errors
import nats.js.errors
from tests.simulation.clock import Process
from tests.simulation.consumers import MAX_PAYLOAD_BYTES, matches
from tests.simulation.jetstream import JetStream
from tests.simulation.network import Network, Way

from dsec.platform.bus import Bus


class Client:
    """A connection of one process, in the shape of `nats.aio.client.Client`."""

    max_payload = MAX_PAYLOAD_BYTES

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.broken = False
        self.out = Way(network, ordered=network.weather.ordered)
        self.back = Way(network, ordered=True, to=process)
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

    async def flush(self, timeout: float = 10.0) -> None:
        """All is sent at once here."""

    async def heard_out(self, timeout_s: float) -> None:
        """The server has answered all that was sent before this."""
        await self.ask("ping", lambda: None, timeout_s)

    def raise_if_refused(self, subject: str) -> None:
        """Everybody may do everything here."""

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
            text = datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")
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


def connect(network: Network, process: Process) -> Bus:
    """The services' bus, over a new connection of a process."""
    client: Any = Client(network, process)
    network.clients.append(client)
    process.on_death.append(client.break_off)
    return Bus(client, process.name)
