"""What calls of one service share: batches, rests that it asks for, and the end of the replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
from tests.reward.http_service import Answer, Asked, HttpService, http_service

from dsec.platform.bus import Bus, Later
from dsec.reward.http_exchange import ServiceFailed
from dsec.reward.outside import Outside
from dsec.reward.services import Request, Response
from dsec_contracts.service import ServiceFact

pytestmark = pytest.mark.nats

WAIT_S_MAX = 60.0
TERMS = {
    "name": "stock",
    "version": 1,
    "qps_budget": 1000,
    "retry": {"backoff_s_min": 0.001, "backoff_s_max": 0.01},
}
BATCH = {"path": "/batch", "size_max": 8}


class Rig:
    """One service, and one replica that asks it."""

    def __init__(self, service: HttpService, outside: Outside) -> None:
        self.service = service
        self._outside = outside
        self.stop = outside.stop

    async def call(self, name: str) -> Response:
        """The answer to a call."""
        request = Request("stock", "GET", name, (), None)
        return await self._outside.call(request, name, batched=True)

    async def asked(self) -> None:
        """Wait until the service is asked."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not self.service.asked:  # noqa: ASYNC110 - the service is asked
                await asyncio.sleep(0.01)


@pytest.fixture
async def rig(nats_url: str) -> AsyncIterator[Callable[..., Rig]]:
    """Makes a rig with terms of its own."""
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    bucket = await bus.bucket(f"test_{uuid.uuid4().hex}")

    async def nobody(*_: object) -> None:
        """Whom it is told that a service is slow."""

    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(bus.close)
        service = await undo.enter_async_context(http_service())

        def make(**terms: object) -> Rig:
            fact = ServiceFact.model_validate({**TERMS, **terms, "base_url": service.url})
            outside = Outside(fact, bucket, "r0", {}, time.time, nobody)
            undo.push_async_callback(outside.close)
            return Rig(service, outside)

        yield make


async def test_a_call_that_is_nearly_over_goes_alone(rig: Callable[..., Rig]) -> None:
    """It would cut short those that could go with it."""
    stock = rig(deadline_s=2.0, attempt_s_max=1.5, batch={**BATCH, "wait_ms": 500})

    async def behave(asked: Asked) -> Answer:
        if len(stock.service.asked) == 1:
            return Answer(never=True)
        await asyncio.sleep(0.8)
        several = json.loads(asked.body)["requests"] if asked.body else []
        return Answer(body={"responses": [{"status": 200, "json": 7} for _ in several]})

    stock.service.behave = behave
    old = asyncio.create_task(stock.call("/old"))
    await stock.asked()
    await asyncio.sleep(1.3)  # the young ones wait for others when the old one comes again
    young = await asyncio.gather(stock.call("/a"), stock.call("/b"))
    with pytest.raises(ServiceFailed, match="no answer within"):
        await old
    assert [found.json() for found in young] == [7, 7]
    assert Counter(asked.path for asked in stock.service.asked) == {"/batch": 2, "/old": 1}


async def test_a_rest_that_the_service_asks_for_is_waited_out_by_the_one_that_was_told(
    rig: Callable[..., Rig],
) -> None:
    """As by those behind it: the rest, not the call, is longer than a call may take."""
    stock = rig(deadline_s=0.5)

    async def behave(asked: Asked) -> Answer:
        if len(stock.service.asked) == 1:
            return Answer(429, "wait", {"Retry-After": "1"})
        return Answer(body=7)

    stock.service.behave = behave
    told = asyncio.create_task(stock.call("/told"))
    await stock.asked()
    behind = asyncio.create_task(stock.call("/behind"))
    async with asyncio.timeout(WAIT_S_MAX):
        assert [(await call).json() for call in (told, behind)] == [7, 7]
    first, *later = stock.service.asked
    assert [asked.path for asked in stock.service.asked].count("/told") == 2
    assert min(asked.at for asked in later) - first.at >= 0.9


async def test_rests_are_excused_and_the_attempts_between_them_are_not(
    rig: Callable[..., Rig],
) -> None:
    stock = rig(deadline_s=0.5, attempt_s_max=0.3)

    async def behave(asked: Asked) -> Answer:
        if len(stock.service.asked) == 1:
            return Answer(429, "wait", {"Retry-After": "1"})
        return Answer(never=True)

    stock.service.behave = behave
    with pytest.raises(ServiceFailed, match="no answer within"):
        await asyncio.wait_for(stock.call("/"), WAIT_S_MAX)
    assert 2 <= len(stock.service.asked) <= 3


async def test_calls_that_wait_for_others_are_handed_back_when_the_replica_stops(
    rig: Callable[..., Rig],
) -> None:
    stock = rig(batch={**BATCH, "wait_ms": 60_000})
    calls = [asyncio.create_task(stock.call(name)) for name in ("/a", "/b")]
    await asyncio.sleep(0.05)
    stock.stop()
    calls.append(asyncio.create_task(stock.call("/c")))
    async with asyncio.timeout(WAIT_S_MAX):
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(one) for one in found] == [Later] * 3
    assert not stock.service.asked
