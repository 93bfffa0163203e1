"""The network between the clients of the bus and its server.

A request travels, is answered, and the answer travels; either may be lost, late or, for publishes,
come twice. Before a request leaves and after it was carried out is where a process can be made to
die.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import Process, VirtualLoop
from tests.simulation.stream import Server

if TYPE_CHECKING:
    from tests.simulation.bus import Client


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

    def tell(self, subject: str, headers: dict[str, str], data: bytes) -> None:
        """Carry a transient message to all who listen."""
        for client in list(self.clients):
            client.hear(subject, headers, data)


class Way:
    """One direction of one connection."""

    def __init__(self, network: Network, *, ordered: bool, to: Process | None = None) -> None:
        self._network = network
        self._to = to
        self._ordered = ordered
        self._last_s = 0.0

    def send(
        self, call: Callable[..., object], *arguments: Any, delay_s: float | None = None
    ) -> None:
        """Have something happen at the other end."""
        network = self._network
        deaf = self._to is not None and network.loop.time() < self._to.deaf_until_s
        if deaf or network.lost():
            return
        at_s = network.loop.time() + (network.delay_s() if delay_s is None else delay_s)
        if self._ordered:
            at_s = self._last_s = max(at_s, self._last_s + 1e-6)
        network.loop.later(at_s - network.loop.time(), call, *arguments)
