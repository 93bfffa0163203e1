"""A call that has little time left does not cut short those that could go with it."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter

import pytest
from tests.reward.http_service import Answer, Asked, http_service

from dsec.platform.bus import Bus
from dsec.reward.http_exchange import ServiceFailed
from dsec.reward.outside import Outside
from dsec.reward.services import Request, Response
from dsec_contracts.service import ServiceFact

pytestmark = pytest.mark.nats

TERMS = {
    "name": "stock",
    "version": 1,
    "qps_budget": 1000,
    "deadline_s": 2.0,
    "attempt_s_max": 1.5,
    "retry": {"backoff_s_min": 0.001, "backoff_s_max": 0.01},
    "batch": {"path": "/batch", "size_max": 8, "wait_ms": 500},
}


async def test_a_call_that_is_nearly_over_goes_alone(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    bucket = await bus.bucket(f"test_{uuid.uuid4().hex}")

    async def nobody(*_: object) -> None:
        """Whom it is told that a service is slow."""

    async with http_service() as service:

        async def behave(asked: Asked) -> Answer:
            if len(service.asked) == 1:
                return Answer(never=True)
            await asyncio.sleep(0.8)
            several = json.loads(asked.body)["requests"] if asked.body else []
            return Answer(body={"responses": [{"status": 200, "json": 7} for _ in several]})

        service.behave = behave
        fact = ServiceFact.model_validate({**TERMS, "base_url": service.url})
        outside = Outside(fact, bucket, "r0", {}, time.time, nobody)

        async def call(name: str) -> Response:
            return await outside.call(Request("stock", "GET", name, (), None), name, batched=True)

        old = asyncio.create_task(call("/old"))
        async with asyncio.timeout(10):
            while not service.asked:  # noqa: ASYNC110 - the service is asked
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.3)  # the young ones wait for others when the old one comes again
        young = await asyncio.gather(call("/a"), call("/b"))
        with pytest.raises(ServiceFailed, match="no answer within"):
            await old
        await outside.close()
    await bus.close()
    assert [found.json() for found in young] == [7, 7]
    assert Counter(asked.path for asked in service.asked) == {"/batch": 2, "/old": 1}
