"""What the scheduler hears of workers, and what it says of it."""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from typing import Any

import pytest

from dsec.platform.bus import Bus
from dsec.scheduler import listening as module
from dsec.scheduler.listening import Listening
from dsec.scheduler.state import SchedulerState
from dsec_contracts import WorkerHeartbeat
from dsec_contracts.worker import HeartbeatCircumstance, HeartbeatFact


async def test_heartbeats_of_another_period_are_told_of_once_for_a_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unused: Any = None
    listening = Listening(unused, SchedulerState(), lambda: 0.0, lambda: None, period_s=1.0)

    async def beat(worker: str, node: str, period_s: float | None) -> None:
        fact = HeartbeatFact(worker=worker, node=node, state="ready")
        told = HeartbeatCircumstance(period_s=period_s)
        event = WorkerHeartbeat(fact=fact, circumstance=told)
        headers = {"ce-type": event.event_type()}
        await listening.on_worker_heartbeat(headers, event.model_dump_json().encode())

    with caplog.at_level(logging.WARNING):
        for worker, node, period_s in (("w1", "a", 1.0), ("w2", "a", None)):
            await beat(worker, node, period_s)
        assert not caplog.records
        for worker in ("w3", "w3", "w4"):
            await beat(worker, "b", 10.0)
        await beat("w5", "c", 10.0)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "worker w3 on b says that it is alive every 10 s",
        "worker w5 on c says that it is alive every 10 s",
    ]
    assert "DSEC_HEARTBEAT_PERIOD_S" in caplog.text


@pytest.mark.nats
async def test_a_bus_that_is_not_heard_is_told_of_once_and_makes_nobody_silent(
    nats_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARD_PERIOD_S", 0.0)
    bus = await Bus.connect(nats_url, "test")
    await bus.close()
    looks, enough = count(1), asyncio.Event()

    def clock() -> float:
        at_s = float(next(looks))
        if at_s == 4.0:
            enough.set()
        return at_s

    state = SchedulerState()
    state.heard_until_s = 0.5
    hearing = Listening(bus, state, clock, lambda: None, period_s=1.0)
    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(hearing.hear_out())
        async with asyncio.timeout(10):
            await enough.wait()
        task.cancel()
        await asyncio.wait([task])
    assert state.heard_until_s == 0.5
    assert len([r for r in caplog.records if "no worker is taken for dead" in r.message]) == 1
