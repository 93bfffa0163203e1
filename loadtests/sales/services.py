"""The three services of the scenario, on loopback: slow now and then, down now and then, finite.

    python loadtests/sales/services.py SEED

prints a JSON line with their URLs and serves until standard input ends; then prints what they saw.
What they answer is a function of the seed and the question alone. When they are slow, down, hang or
refuse follows from the seed and the time since they began.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from random import Random
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

QPS_BUDGET = {"inventory": 100.0, "price": 100.0, "risk": 100.0}
"""What is agreed with each service. They can do a fifth more."""
HEADROOM = 1.2
QUEUE_S_MAX = 1.5
"""A call that would wait longer than this is refused, 429."""
RETRY_AFTER_S = 1
LATENCY_S = {"inventory": 0.015, "price": 0.03, "risk": 0.05}
"""Median; log-normal."""
LATENCY_SIGMA = 0.4
SLOW_FACTOR = 10.0
SLOW_EVERY_S, SLOW_FOR_S = 30.0, 6.0
"""Mean time between slow spells of a service, and how long one takes; likewise outages, and spells
in which it refuses everybody, 429."""
DOWN_EVERY_S, DOWN_FOR_S = 40.0, 3.0
REFUSING_EVERY_S, REFUSING_FOR_S = 25.0, 1.0
HANGS_SHARE = 0.001
HORIZON_S = 3_600.0
WINDOW_S = 10.0
TOLERANCE = 1.05
FLAGGED_SHARE = 0.03
FLAGGED_SHARE_PLANTED = 0.3
PLANTED_HOURS = 3


def planted_hours(seed: int) -> list[int]:
    """The hours in which the risk service takes many good customers for bad ones."""
    return sorted(Random(f"{seed} hours").sample(range(24), PLANTED_HOURS))


def chance(seed: int, *question: Any) -> float:
    """A number within 0 to 1 that the question alone decides."""
    digest = hashlib.sha256(json.dumps([seed, *question]).encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56)


def spells(random: Random, every_s: float, for_s: float) -> list[tuple[float, float]]:
    """When something begins and ends, over the horizon."""
    found, at = [], 0.0
    while (at := at + random.expovariate(1 / every_s)) < HORIZON_S:
        end = at + for_s * random.uniform(0.5, 1.5)
        found.append((at, end))
        at = end
    return found


def within(times: list[tuple[float, float]], at: float) -> bool:
    """Whether one of the spells holds."""
    n = bisect_left(times, (at, float("inf"))) - 1
    return n >= 0 and at < times[n][1]


@dataclass
class Service:
    """One service: how it fares, and what it saw."""

    name: str
    seed: int
    began_s: float
    arrivals_s: list[float] = field(default_factory=list)
    refused: int = 0
    free_at_s: float = 0.0

    def __post_init__(self) -> None:
        self.random = Random(f"{self.seed} {self.name}")
        self.slow = spells(self.random, SLOW_EVERY_S, SLOW_FOR_S)
        self.down = spells(self.random, DOWN_EVERY_S, DOWN_FOR_S)
        self.refusing = spells(self.random, REFUSING_EVERY_S, REFUSING_FOR_S)

    async def trouble(self) -> Response | None:
        """Take the time that a call takes; a response if it is not to be answered."""
        now = asyncio.get_running_loop().time() - self.began_s
        self.arrivals_s.append(now)
        drawn = self.random.random()
        if within(self.down, now):
            return Response("down", 503)
        wait_s = max(0.0, self.free_at_s - now)
        if wait_s > QUEUE_S_MAX or within(self.refusing, now):
            self.refused += 1
            return Response("too many", 429, headers={"Retry-After": str(RETRY_AFTER_S)})
        if drawn > 1 - HANGS_SHARE:
            await asyncio.sleep(HORIZON_S)
        self.free_at_s = now + wait_s + 1 / (QPS_BUDGET[self.name] * HEADROOM)
        latency_s = LATENCY_S[self.name] * self.random.lognormvariate(0.0, LATENCY_SIGMA)
        await asyncio.sleep(wait_s + latency_s * (SLOW_FACTOR if within(self.slow, now) else 1.0))
        return None

    def over_budget(self) -> int:
        """Calls that came when the ten seconds before them already had all that is agreed."""
        most = QPS_BUDGET[self.name] * WINDOW_S * TOLERANCE
        first, over = 0, 0
        for n, at in enumerate(self.arrivals_s):
            while self.arrivals_s[first] <= at - WINDOW_S:
                first += 1
            over += n - first + 1 > most
        return over


def application(services: dict[str, Service], seed: int) -> Starlette:
    """All three, each below its name; `/clear` forgets what was seen and begins anew."""
    bad_hours = set(planted_hours(seed))

    async def stock(request: Request) -> Response:
        asked = dict(request.query_params)
        trouble = await services["inventory"].trouble()
        share = 0.7 + 0.3 * chance(seed, "stock", asked)
        return trouble or JSONResponse({"share": share})

    async def quote(request: Request) -> Response:
        asked = await request.json()
        trouble = await services["price"].trouble()
        off = 0.06 * bin(asked["coupons"]).count("1")
        lift = 1 + 2.5 * off * chance(seed, "lift", asked["segment"], asked["coupons"])
        gmv = asked["basket"] * lift
        return trouble or JSONResponse({"gmv": gmv, "margin": gmv * (0.3 - off)})

    async def assess(request: Request) -> Response:
        asked = await request.json()
        trouble = await services["risk"].trouble()
        share = FLAGGED_SHARE_PLANTED if asked["hour"] in bad_hours else FLAGGED_SHARE
        flagged = chance(seed, "risk", asked) < (share if asked["good"] else 0.9)
        return trouble or JSONResponse({"flagged": flagged})

    return Starlette(
        routes=[
            Route("/inventory/stock", stock),
            Route("/price/quote", quote, methods=["POST"]),
            Route("/risk/assess", assess, methods=["POST"]),
        ]
    )


async def serve(seed: int) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    services = {name: Service(name, seed, loop.time()) for name in QPS_BUDGET}
    config = uvicorn.Config(
        application(services, seed), port=0, log_level="critical", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells it in no other way
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    print(json.dumps({n: f"http://127.0.0.1:{port}/{n}" for n in services}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    seen = {
        n: {"calls": len(s.arrivals_s), "refused": s.refused, "over_budget": s.over_budget()}
        for n, s in services.items()
    }
    print(json.dumps(seen), flush=True)
    server.should_exit = server.force_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
