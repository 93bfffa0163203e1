"""A stack whose processes all run and whose log stands still is not well."""

from __future__ import annotations

import asyncio

import pytest

from dsec.cli import standstill as module
from dsec.cli.standstill import standstill
from dsec.platform.bus import Bus
from dsec.platform.stack.ports import free_port

pytestmark = pytest.mark.nats


async def test_a_log_that_stands_still_is_told(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STILL_S", 0.2)
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    await bus.delete_consumer("recorder")
    assert await standstill(nats_url) is None  # nobody records: `status` names who does not run
    start = (await bus.stream_state()).last_sequence + 1
    recorder = await bus.consumer("recorder", ["dsec.spec.>"], ack="all", start_sequence=start)
    assert await standstill(nats_url) is None
    await bus.publish_raw("dsec.spec.registered.x", b"{}", {})
    assert "1 messages wait to be logged" in str(await standstill(nats_url))
    [message] = await recorder.fetch(1, 2)
    assert "1 messages wait" in str(await standstill(nats_url))
    await message.ack()
    await bus.stream_state()
    assert await standstill(nats_url) is None
    await bus.delete_consumer("recorder")
    await bus.close()


async def test_a_bus_that_does_not_answer_is_told_within_seconds() -> None:
    async with asyncio.timeout(10):
        told = await standstill(f"nats://127.0.0.1:{free_port()}")
    assert "no NATS server answers" in str(told)
