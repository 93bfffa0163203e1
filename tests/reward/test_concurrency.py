"""How many requests a replica sends to a service at a time, and that it may be declared anew."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator

import pytest
from tests.reward.http_service import Answer, Asked, http_service

from dsec.platform.bus import Bus
from dsec.reward.outside import Outside
from dsec.reward.services import Request
from dsec_contracts.service import ServiceFact

pytestmark = pytest.mark.nats


class Crowd:
    """Calls of one service, which answers none before it is told to."""

    def __init__(self, outside: Outside, url: str) -> None:
        self.outside = outside
        self.url = url
        self.leave = asyncio.Event()
        self.calls: list[asyncio.Task[object]] = []
        self.inside: list[str] = []

    async def behave(self, asked: Asked) -> Answer:
        """The service."""
        self.inside.append(asked.path)
        await self.leave.wait()
        self.inside.remove(asked.path)
        return Answer(body={})

    def call(self, count: int) -> None:
        """So many come."""
        for _ in range(count):
            request = Request("stock", "GET", f"/{len(self.calls)}", (), None)
            call = self.outside.call(request, str(len(self.calls)))
            self.calls.append(asyncio.create_task(call))

    def declare(self, concurrency_max: int) -> None:
        """From now on so many at a time."""
        self.outside.declared(declaration(self.url, concurrency_max))

    async def expect(self, *inside: int) -> None:
        """These are under way, and no others join them."""
        wanted = [f"/{n}" for n in inside]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                while sorted(self.inside) != wanted:  # noqa: ASYNC110 - the service is asked
                    await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert sorted(self.inside) == wanted


def declaration(url: str, concurrency_max: int) -> ServiceFact:
    """Of a service that is asked as fast as it answers."""
    told = {"qps_budget": 1000, "deadline_s": 60.0, "concurrency_max": concurrency_max}
    return ServiceFact.model_validate({"name": "stock", "base_url": url, "version": 1, **told})


@pytest.fixture
async def crowd(nats_url: str) -> AsyncIterator[Crowd]:
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    bucket = await bus.bucket(f"test_{uuid.uuid4().hex}")

    async def nobody(*_: object) -> None:
        """Whom it is told that a service is slow."""

    async with http_service() as service:
        fact = declaration(service.url, 3)
        crowd = Crowd(Outside(fact, bucket, "r0", {}, time.time, nobody), service.url)
        service.behave = crowd.behave
        yield crowd
        for call in crowd.calls:
            call.cancel()
        await asyncio.gather(*crowd.calls, return_exceptions=True)
        await crowd.outside.close()
    await bus.close()


async def test_those_under_way_count_when_it_is_declared_anew(crowd: Crowd) -> None:
    crowd.call(6)
    await crowd.expect(0, 1, 2)
    crowd.declare(3)
    await crowd.expect(0, 1, 2)  # not twice as many
    crowd.declare(4)
    await crowd.expect(0, 1, 2, 3)
    crowd.declare(1)
    crowd.leave.set()
    await asyncio.gather(*crowd.calls[:4])
    await asyncio.gather(*crowd.calls)
    crowd.leave.clear()
    crowd.call(2)
    await crowd.expect(6)


async def test_who_is_cancelled_takes_no_place_and_gives_back_the_one_it_has(crowd: Crowd) -> None:
    crowd.declare(1)
    crowd.call(4)
    await crowd.expect(0)
    crowd.calls[1].cancel()
    crowd.calls[0].cancel()
    await asyncio.gather(*crowd.calls[:2], return_exceptions=True)
    crowd.inside.clear()  # the service does not learn that nobody waits for its answer
    await crowd.expect(2)
