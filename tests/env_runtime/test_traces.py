"""Spans of a worker: starts, ticks, and steps of the sessions that ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from tests.env_runtime.conftest import LaneRig, World, code_of, request_of
from tests.otlp import Received, Receiver

from dsec.env_runtime.traces import LaneTraces, asks_for_steps
from dsec.env_runtime.worker import Worker
from dsec.platform.settings import Settings
from dsec.platform.telemetry import LINKS_MAX, Telemetry, connect, parse_traceparent
from dsec.platform.telemetry.ids import placement_span, start_span, step_span, tick_span
from dsec_contracts import SessionStepped

pytestmark = [pytest.mark.nats, pytest.mark.postgres]

STEPS = {"labels": {"dsec.trace": "steps"}}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An OTLP receiver that takes everything."""
    made = Receiver()
    yield made
    made.close()


def telemetry_to(receiver: Receiver, **variables: str) -> Telemetry:
    told = {"OTEL_BSP_SCHEDULE_DELAY": "50", **variables}
    return connect(Settings(otlp_endpoint=receiver.url, otel=told), "env-runtime", "w1")


def tracing(telemetry: Telemetry) -> Any:
    """A worker with telemetry, as `World.worker` makes one."""
    return partial(Worker, telemetry=telemetry)


async def closed(telemetry: Telemetry) -> None:
    """Everything has been sent. Beside the loop, which goes on."""
    await asyncio.to_thread(telemetry.close)


def by_name(receiver: Receiver, session_id: UUID) -> dict[str, list[Received]]:
    found: dict[str, list[Received]] = {}
    for span in receiver.of(session_id):
        found.setdefault(span.name, []).append(span)
    return found


async def test_a_session_that_asks_has_a_span_for_each_step_and_others_have_none(
    world: World, receiver: Receiver
) -> None:
    world.record()
    telemetry = telemetry_to(receiver)
    world.answering = True
    await world.worker(kind=tracing(telemetry))
    asks = await world.run_session(max_steps=3, **STEPS)
    other = await world.run_session(max_steps=3)
    for request in (asks, other):
        assert (await world.ended(request.session_id)).fact.status == "completed"
    await closed(telemetry)
    session_id = asks.session_id
    found = by_name(receiver, session_id)
    placement = placement_span(session_id, 1).span_id
    assert {span.parent_id for spans in found.values() for span in spans} == {placement}
    assert [span.span_id for span in found["start"]] == [start_span(session_id, 1).span_id]
    assert [span.span_id for span in found["step"]] == [
        step_span(session_id, n).span_id for n in range(3)
    ]
    assert not any(span.failed for span in found["step"])
    # A step lasts until its answer; each links to the tick that published it.
    ticks = {span.span_id: span for span in receiver.named("tick")}
    for step in found["step"]:
        ((_, tick),) = step.links
        assert ticks[tick].start_ns <= step.start_ns < step.end_ns
        assert (session_id.int, placement) in ticks[tick].links
    assert by_name(receiver, other.session_id).keys() == {"start"}
    told = {name: points for (_, name), points in receiver.metrics.items()}
    assert told["dsec.steps"] == [6]
    assert told["ssal"] == [2]


async def test_a_tick_names_its_span_to_whoever_answers_it(
    world: World, receiver: Receiver
) -> None:
    world.record()
    telemetry = telemetry_to(receiver)
    world.answering = True
    await world.worker(kind=tracing(telemetry))
    request = await world.run_session(max_steps=2)
    await world.ended(request.session_id)
    await closed(telemetry)
    named = [
        parse_traceparent(message.envelope().traceparent)
        for message, event in world.seen
        if isinstance(event, SessionStepped)
    ]
    assert [(ref.trace_id, ref.span_id) for ref in named if ref] == [
        (span.trace_id, span.span_id) for span in receiver.named("tick")
    ]
    assert len(named) == 2


async def test_the_chain_is_the_same_with_and_without_telemetry(
    world: World, receiver: Receiver
) -> None:
    world.record()
    telemetry = telemetry_to(receiver)
    world.answering = True
    await world.worker("w1", kind=tracing(telemetry))
    await world.worker("w2")
    code = code_of()
    traced = await world.run_session(code, max_steps=5, **STEPS)
    plain = await world.run_session(code, max_steps=5)
    away = request_of(code, max_steps=5)
    await world.place(away, "w2")
    chains = {
        (await world.ended(request.session_id)).fact.chain for request in (traced, plain, away)
    }
    assert len(chains) == 1
    assert (await world.verdict(traced)).ok
    await closed(telemetry)
    assert len(by_name(receiver, traced.session_id)["step"]) == 5
    bare = [
        message
        for message, event in world.seen
        if isinstance(event, SessionStepped) and event.circumstance.worker == "w2"
    ]
    assert bare
    assert all("traceparent" not in message.headers for message in bare)


async def test_a_step_that_is_not_answered_here_says_so(world: World, receiver: Receiver) -> None:
    world.record()
    telemetry = telemetry_to(receiver)
    run = await world.worker(kind=tracing(telemetry))
    request = await world.run_session(**STEPS)
    await world.stepped(request.session_id, 1)
    run.stop.set()
    await world.released(request.session_id)
    await closed(telemetry)
    (step,) = by_name(receiver, request.session_id)["step"]
    assert step.failed


async def test_a_start_that_fails_says_why(world: World, receiver: Receiver) -> None:
    world.record()
    telemetry = telemetry_to(receiver)
    await world.worker(kind=tracing(telemetry))
    request = await world.run_session(code_of(agent="raise ValueError('no agent')"))
    assert (await world.ended(request.session_id)).fact.status == "failed"
    await closed(telemetry)
    (start,) = by_name(receiver, request.session_id)["start"]
    assert start.failed


async def test_what_is_not_sampled_costs_no_span_and_no_header(
    world: World, receiver: Receiver
) -> None:
    world.record()
    telemetry = telemetry_to(receiver, OTEL_TRACES_SAMPLER="always_off")
    world.answering = True
    await world.worker(kind=tracing(telemetry))
    request = await world.run_session(max_steps=2, **STEPS)
    await world.ended(request.session_id)
    await closed(telemetry)
    assert not receiver.spans
    assert not asks_for_steps(telemetry, request)
    stepped = [m for m, event in world.seen if isinstance(event, SessionStepped)]
    assert not [m for m in stepped if "traceparent" in m.headers]


async def test_a_receiver_that_hangs_holds_up_no_session(world: World, receiver: Receiver) -> None:
    receiver.wait_s = 60.0
    world.record()
    telemetry = telemetry_to(receiver, OTEL_BSP_MAX_QUEUE_SIZE="4")
    world.answering = True
    await world.worker(kind=tracing(telemetry))
    request = await world.run_session(max_steps=30, **STEPS)
    assert (await world.ended(request.session_id)).fact.steps == 30
    await closed(telemetry)
    assert not receiver.spans
    assert getattr(telemetry, "delivery").lost >= 60  # noqa: B009 - a tick and a step each


async def test_a_tick_links_to_a_few_sessions_and_first_to_those_that_ask(
    rig: LaneRig, receiver: Receiver
) -> None:
    await rig.start()
    telemetry = telemetry_to(receiver)
    seats = [rig.seat() for _ in range(LINKS_MAX + 3)]
    seats[-1].trace_steps = True
    taken: list[Any] = [(seat, seat.machine.step()) for seat in seats]
    LaneTraces(telemetry, "w1-0").published(tick_span("w1-0", 1), taken, again=False)
    await closed(telemetry)
    (tick,) = receiver.named("tick")
    assert tick.attributes["dsec.rows"] == len(seats)
    wanted = [seats[-1], *seats[: LINKS_MAX - 1]]
    assert tick.links == [placement_span(seat.placed.session_id, 1) for seat in wanted]
