"""Spans that the scheduler sends, and its numbers, with a receiver that is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.otlp import Received, Receiver
from tests.scheduler.conftest import World, request_fact, uuid7

from dsec.platform.bus import Message
from dsec.platform.clock import nanoseconds
from dsec.platform.settings import Settings
from dsec.platform.telemetry import connect
from dsec.platform.telemetry.ids import placement_span, session_span
from dsec.scheduler.gauges import heartbeat_age_p95_s, utilisation
from dsec.scheduler.intake import Requested
from dsec.scheduler.state import SchedulerState, Worker
from dsec.scheduler.traces import Traces
from dsec_contracts import Envelope, Event, SessionEnded, SessionPlaced, SessionRequested, keys
from dsec_contracts.session import (
    EndedFact,
    PlacedCircumstance,
    PlacedFact,
    RejectFact,
    RequestFact,
    SessionRejected,
)

UPSTREAM = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
TRACEPARENT = f"00-{UPSTREAM[0]:032x}-{UPSTREAM[1]:016x}-01"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver that every service which starts now sends to."""
    made = Receiver()
    monkeypatch.setenv("DSEC_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
    yield made
    made.close()


def ended(session_id: UUID, code: str = "max_steps", status: Any = "completed") -> SessionEnded:
    fact = EndedFact(
        session_id=session_id,
        status=status,
        code=code,
        steps=10,
        episodes=1,
        inputs=b"\x80",
        chain=bytes(32),
    )
    return SessionEnded(fact=fact)


async def spans(receiver: Receiver, session_id: UUID, count: int) -> dict[str, list[Received]]:
    """The spans of a session by name, once there are so many."""
    await asyncio.to_thread(receiver.until, lambda: len(receiver.of(session_id)) >= count)
    found: dict[str, list[Received]] = {}
    for span in sorted(receiver.of(session_id), key=lambda span: span.start_ns):
        found.setdefault(span.name, []).append(span)
    return found


# -- on real servers ---------------------------------------------------------------------------


@pytest.mark.nats
@pytest.mark.postgres
async def test_one_trace_tells_a_session_from_its_request_to_its_end(
    world: World, receiver: Receiver
) -> None:
    world.lead()
    await world.led()  # of a request that the log has already, nobody knows who asked
    world.worker("w1")
    request = request_fact()
    session_id = request.session_id
    await world.publish(
        SessionRequested(fact=request), session_id, event_id="asked", traceparent=TRACEPARENT
    )
    await world.placed(session_id)
    world.dies("w1", "signal")
    world.worker("w2")
    await world.placed(session_id, 2)
    told = ("rus", "session_heartbeat_p95", "dsec.workers.fenced", "dsec.sessions.placed")
    wanted = {("dsec-scheduler", name) for name in told}
    await asyncio.to_thread(receiver.until, lambda: wanted <= receiver.metrics.keys())
    await world.publish(ended(session_id), session_id, session_id=session_id)
    found = await spans(receiver, session_id, 3)
    (root,), (first, second) = found["session"], found["placement"]
    # Parents are named without being asked, so the names have to fit.
    assert (root.span_id, root.parent_id) == (session_span(session_id).span_id, 0)
    assert {span.parent_id for span in (first, second)} == {root.span_id}
    assert [span.span_id for span in (first, second)] == [
        placement_span(session_id, attempt).span_id for attempt in (1, 2)
    ]
    # Who asked for it, in a trace of their own.
    assert root.links == [UPSTREAM]
    assert [(s.failed, s.attributes["dsec.placement.end"]) for s in (first, second)] == [
        (True, "worker fenced: signal"),
        (False, "ended: max_steps"),
    ]
    assert root.attributes["dsec.session.attempts"] == 2
    assert {span.service for span in receiver.of(session_id)} == {"dsec-scheduler"}
    await asyncio.to_thread(
        receiver.until, lambda: receiver.metrics["dsec-scheduler", "dsec.sessions.ended"] == [1]
    )


@pytest.mark.nats
@pytest.mark.postgres
@pytest.mark.parametrize("meanwhile", [True, False])
async def test_a_scheduler_that_takes_over_knows_when_an_attempt_began(
    world: World, receiver: Receiver, meanwhile: bool
) -> None:
    """Whether the session ends while no scheduler leads, or under the second one."""
    world.worker("w1")
    world.lead()
    request = await world.request()
    session_id = request.session_id
    await world.placed(session_id)
    world.dies("w1", "signal")
    world.worker("w2")
    await world.placed(session_id, 2)
    placed = [message for message, event in world.seen if isinstance(event, SessionPlaced)]
    await world.logged(session_id, keys.placed(2))
    world.tasks[-1][1].set()
    await world.tasks.pop()[0]
    if not meanwhile:
        world.lead()
        await world.placed((await world.request()).session_id)  # so it leads by now
    await world.publish(ended(session_id), session_id)
    if meanwhile:
        await world.logged(session_id, keys.ENDED)
        world.lead()
    found = await spans(receiver, session_id, 3)
    assert [span.start_ns for span in found["placement"]] == [
        nanoseconds(message.envelope().time) for message in placed[:2]
    ]
    assert [span.span_id for span in found["placement"]] == [
        placement_span(session_id, attempt).span_id for attempt in (1, 2)
    ]
    # What the first one has sent, the second one does not.
    assert {name: len(of) for name, of in found.items()} == {
        "session": 1,
        "placement": 2,
    }


# -- event by event ----------------------------------------------------------------------------

START = datetime(2026, 1, 2, tzinfo=UTC)


class Seen:
    """Events as the stream shows them, a second apart."""

    def __init__(self, url: str, closed: set[UUID], **variables: str) -> None:
        self.telemetry = connect(Settings(otlp_endpoint=url, otel=variables), "scheduler", "one")
        self.traces = Traces(self.telemetry, closed)
        self.count = 0

    def see(self, event: Event, event_id: str = "e", traceparent: str | None = None) -> int:
        """One event; returns its time."""
        self.count += 1
        at = START + timedelta(seconds=self.count)
        kind = event.event_type()
        headers = Envelope(event_id, kind, "test", at, traceparent=traceparent).headers()
        message = Message("s", headers, b"", self.count, 1, at, None)  # type: ignore[arg-type]
        reading = Requested(event_id, event) if isinstance(event, SessionRequested) else event
        self.traces.seen(message, reading)
        return nanoseconds(at)


def placed(request: RequestFact, attempt: int = 1, worker: str = "w1") -> SessionPlaced:
    fact = PlacedFact(
        session_id=request.session_id, attempt=attempt, worker=worker, lane=f"{worker}-0"
    )
    return SessionPlaced(fact=fact, circumstance=PlacedCircumstance(request=request))


def test_seen_again_after_a_takeover_it_is_the_same_span(receiver: Receiver) -> None:
    request = request_fact()
    for _ in range(2):
        seen = Seen(receiver.url, set())
        seen.see(SessionRequested(fact=request), traceparent=TRACEPARENT)
        seen.see(placed(request))
        seen.see(ended(request.session_id))
        seen.telemetry.close()
    assert len(receiver.spans) == 4
    assert receiver.spans[:2] == receiver.spans[2:]


def test_what_another_scheduler_has_told_is_remembered_and_not_told_again(
    receiver: Receiver,
) -> None:
    request, over = request_fact(), request_fact()
    seen = Seen(receiver.url, set())
    seen.traces.follow(4)
    seen.see(SessionRequested(fact=request), traceparent=TRACEPARENT)
    began_ns = seen.see(placed(request))
    seen.see(placed(over))
    seen.see(ended(over.session_id))
    seen.see(ended(request.session_id))
    seen.telemetry.close()
    assert [span.name for span in receiver.spans] == ["placement", "session"]
    assert {span.trace_id for span in receiver.spans} == {request.session_id.int}
    assert receiver.spans[0].start_ns == began_ns
    assert receiver.spans[1].links == [UPSTREAM]
    assert not seen.traces._open


def test_of_several_ends_the_first_is_told(receiver: Receiver) -> None:
    request = request_fact()
    closed: set[UUID] = set()
    seen = Seen(receiver.url, closed)
    seen.see(placed(request))
    seen.see(ended(request.session_id, "agent_error", "failed"))
    closed.add(request.session_id)
    seen.see(ended(request.session_id, "cancelled", "cancelled"))
    seen.telemetry.close()
    (root,) = receiver.named("session")
    assert (root.attributes["dsec.session.code"], root.failed) == ("agent_error", True)


def test_an_end_whose_beginning_nobody_remembers_has_a_root_all_the_same(
    receiver: Receiver,
) -> None:
    session_id = uuid7()
    seen = Seen(receiver.url, set())
    seen.see(ended(session_id))
    seen.telemetry.close()
    (root,) = receiver.spans
    assert root.span_id == session_span(session_id).span_id


def test_nothing_is_kept_of_sessions_that_are_over_refused_or_not_traced(
    receiver: Receiver,
) -> None:
    closed: set[UUID] = set()
    seen = Seen(receiver.url, closed)
    over, refused, repeated = request_fact(), request_fact(), request_fact()
    closed.add(repeated.session_id)
    for request in (over, refused, repeated):
        seen.see(SessionRequested(fact=request))
    seen.see(placed(over))
    seen.see(ended(over.session_id))
    told = RejectFact(event_id="e", code="unregistered_spec", session_id=str(refused.session_id))
    seen.see(SessionRejected(fact=told))
    assert not seen.traces._open
    assert not seen.traces._on_worker
    none = Seen(receiver.url, set(), OTEL_TRACES_SAMPLER="always_off")
    none.see(SessionRequested(fact=over))
    none.see(placed(over))
    assert not none.traces._open


# -- numbers -----------------------------------------------------------------------------------


def state_of(*workers: tuple[int, int, float | None, bool]) -> SchedulerState:
    """Workers by sessions, capacity, when they were heard, and whether they are ready."""
    state = SchedulerState()
    for n, (count, capacity, heard_at_s, ready) in enumerate(workers):
        state.workers[f"w{n}"] = Worker(
            f"w{n}",
            capacity_sessions=capacity,
            heard_at_s=heard_at_s,
            ready=ready,
            sessions={uuid7() for _ in range(count)},
        )
    return state


def test_utilisation_is_seats_in_use_over_seats_of_ready_workers() -> None:
    assert utilisation(state_of((3, 10, 0, True), (2, 10, 0, True), (9, 9, 0, False))) == 0.25
    assert utilisation(state_of()) is None


def test_the_age_of_heartbeats_counts_sessions_and_not_workers() -> None:
    # 5 of 100 sessions are silent for long: the 95th percentile is the others'.
    assert heartbeat_age_p95_s(state_of((95, 100, 9, True), (5, 100, 1, True)), 10) == 1
    assert heartbeat_age_p95_s(state_of((94, 100, 9, True), (6, 100, 1, True)), 10) == 9
    assert heartbeat_age_p95_s(state_of((0, 100, 9, True), (5, 100, None, True)), 10) is None
