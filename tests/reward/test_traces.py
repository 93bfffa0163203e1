"""The reward service's spans and counts: within the trace of the tick that it scores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.otlp import Receiver
from tests.reward.conftest import ENV_SPEC, Rig, spec_of

from dsec.platform.telemetry.ids import child, tick_span

pytestmark = pytest.mark.nats

BROKEN = spec_of("@dsec.reward\ndef score(t, services):\n    raise ValueError('broken')\n")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver that every replica which starts now sends to."""
    made = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    yield made
    made.close()


async def test_a_call_lies_in_the_trace_of_its_tick(rig: Rig, receiver: Receiver) -> None:
    rig.know(BROKEN)
    tick = tick_span(rig.lane, 1)
    rig.start()
    await rig.send([ENV_SPEC[0], ENV_SPEC[0], BROKEN[0]], "a", traceparent=tick.traceparent())
    await rig.send([ENV_SPEC[0]], "b", step=1)  # of a lane that is not traced
    await rig.scored(2)
    await asyncio.to_thread(receiver.until, lambda: receiver.spans)
    (span,) = receiver.spans
    assert (span.service, span.name) == ("dsec-reward", "reward")
    assert (span.trace_id, span.parent_id) == tick
    assert span.span_id == child(tick.trace_id, "reward", f"{rig.lane}.a").span_id
    assert span.attributes["dsec.rows"] == 3

    def counted() -> bool:
        told = {name: points for (_, name), points in receiver.metrics.items()}
        return (
            told.get("dsec.ticks.rewarded") == [2]
            and told["dsec.rewards"] == [3]
            and told["dsec.rewards.missing"] == [1]
        )

    await asyncio.to_thread(receiver.until, counted)


async def test_what_is_put_aside_is_counted(rig: Rig, receiver: Receiver) -> None:
    rig.start()
    await rig.bus.publish_raw(
        f"dsec.session.stepped.{rig.lane}",
        b"{}",
        {
            "ce-id": "x",
            "ce-type": "session.stepped.v1",
            "ce-source": "test",
            "ce-time": "2026-01-01T00:00:00Z",
        },
    )
    key = ("dsec-reward", "dsec.dead_letters")
    await asyncio.to_thread(receiver.until, lambda: receiver.metrics.get(key) == [1])


async def test_stopped_it_sends_what_waits(
    rig: Rig, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    replica = rig.start()
    await rig.send([ENV_SPEC[0]], traceparent=tick_span(rig.lane, 1).traceparent())
    await rig.scored(1)
    replica.terminate()
    assert await asyncio.to_thread(replica.wait, 20) == 0
    assert [span.name for span in receiver.spans] == ["reward"]
