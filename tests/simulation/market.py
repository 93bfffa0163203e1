"""A simulated HTTP service that reward functions ask, behind the real client of the services.

It is fast, or slow in the spells of the plan, and what it answers is a function of the question
alone. While the weather lasts it also refuses and does not answer now and then. Whether rewards are
deferred is decided by the reward service's own code, from how long its calls take.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import Process
from yarl import URL

from dsec.reward import standing, switch
from dsec_contracts.service import ServiceBatch, ServiceFact, ServiceRetry

if TYPE_CHECKING:
    from tests.simulation.world import World

NAME = "market"
FAST_S = (0.001, 0.03)
SLOW_S = (0.2, 1.2)
LATENCY_SWITCH_MS = 100.0
NEVER_S = 1e4
TROUBLE_SHARE = 0.03
"""Of calls while the weather lasts: refused; as many are never answered."""
REST_S = 0.2
BATCH_PATH = "/several"
DECLARED = ServiceFact(
    name=NAME,
    version=1,
    base_url="http://market.test/v1",
    qps_budget=50.0,
    deadline_s=300.0,
    attempt_s_max=3.0,
    retry=ServiceRetry(attempts_max=100, backoff_s_max=0.5),
    latency_switch_ms=LATENCY_SWITCH_MS,
    batch=ServiceBatch(path=BATCH_PATH, size_max=4, wait_ms=20.0),
)
"""It is waited for: no reward is missing for its sake."""


def worth(params: dict[str, str]) -> dict[str, Any]:
    """What it answers."""
    return {"worth": (7 * int(params["step"]) + 3 * int(params["action"])) % 11 / 4}


class Market:
    """The way from one process to the service, in the shape of `aiohttp.ClientSession`."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    async def close(self) -> None:
        """Nothing is open."""

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, url: URL, *, data: bytes | None, **_: object
    ) -> AsyncIterator[SimpleNamespace]:
        """Carry out one exchange."""
        world, loop, process = self._world, self._world.loop, self._process
        if world.boundary(process, "ask", "before"):
            await loop.create_future()
        drawn = 1.0 if world.network.calm else world.chance.random()
        if drawn < TROUBLE_SHARE:
            await asyncio.sleep(NEVER_S)
        low, high = SLOW_S if world.plan.slow(loop.time()) else FAST_S
        await asyncio.sleep(world.chance.uniform(low, high))
        if world.boundary(process, "ask", "after"):
            await loop.create_future()
        refused = drawn < 2 * TROUBLE_SHARE
        yield _answer(503, None) if refused else _answer(200, _said(url, data))


def _said(url: URL, data: bytes | None) -> Any:
    if not url.path.endswith(BATCH_PATH):
        return worth(dict(url.query))
    asked = json.loads(data or b"")["requests"]
    return {"responses": [{"status": 200, "json": worth(dict(one["params"]))} for one in asked]}


def _answer(status: int, said: Any) -> SimpleNamespace:
    """In the shape of `aiohttp.ClientResponse`."""

    async def iter_chunked(_: int) -> AsyncIterator[bytes]:
        yield json.dumps(said).encode()

    headers = {"retry-after": str(REST_S)} if status != 200 else {}
    content = SimpleNamespace(iter_chunked=iter_chunked)
    return SimpleNamespace(status=status, headers=headers, content=content)


@contextlib.contextmanager
def short_memory() -> Iterator[None]:
    """Sessions here live for seconds: a mode is decided on few calls, and recovered from soon."""
    ours: list[tuple[Any, str, float]] = [
        (switch, "WINDOW_S", 1.0),
        (switch, "SAMPLES_MIN", 2),
        (switch, "RECOVER_S", 0.4),
        (standing, "REPORT_PERIOD_S", 0.2),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in ours]
    try:
        for module, name, value in ours:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
