"""Spans of what is durable: in the traces of ticks, and in nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from tests.otlp import Receiver

from dsec.platform.bus import Message
from dsec.platform.clock import nanoseconds
from dsec.platform.settings import Settings
from dsec.platform.telemetry import connect
from dsec.platform.telemetry.ids import child, request_span, session_span, tick_span
from dsec.recorder.effects import Item
from dsec.recorder.intake import Cold, Unfit
from dsec.recorder.traces import committed_items
from dsec_contracts import Envelope

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An OTLP receiver that takes everything."""
    made = Receiver()
    yield made
    made.close()


def item(subject: str, event_id: str, traceparent: str | None) -> Item:
    headers = {"ce-id": event_id} | ({"traceparent": traceparent} if traceparent else {})
    message = Message(subject, headers, b"", 7, 1, AT, None)  # type: ignore[arg-type]
    return Item(message, Unfit("what it holds does not matter"))


@pytest.mark.parametrize("subject", ["dsec.session.stepped.w1-0", "dsec.reward.scored.w1-0"])
def test_a_message_of_a_tick_has_a_span_from_the_stream_to_the_commit(
    receiver: Receiver, subject: str
) -> None:
    tick = tick_span("w1-0", 1)
    telemetry = connect(Settings(otlp_endpoint=receiver.url, otel={}), "recorder", "one")
    committed = AT + timedelta(milliseconds=30)
    committed_items(telemetry, [item(subject, "e", tick.traceparent())], committed)
    telemetry.close()
    (span,) = receiver.spans
    assert (span.service, span.name) == ("dsec-recorder", "commit")
    assert (span.trace_id, span.parent_id) == tick
    assert span.span_id == child(tick.trace_id, "commit", "e").span_id
    assert (span.start_ns, span.end_ns) == (nanoseconds(AT), nanoseconds(committed))


@pytest.mark.parametrize(
    ("subject", "traceparent"),
    [
        ("dsec.session.requested.x", tick_span("theirs", 1).traceparent()),
        ("dsec.session.stepped.w1-0", None),
        ("dsec.session.stepped.w1-0", "garbage"),
    ],
)
def test_nothing_is_sent_into_the_trace_of_whoever_asked(
    receiver: Receiver, subject: str, traceparent: str | None
) -> None:
    telemetry = connect(Settings(otlp_endpoint=receiver.url, otel={}), "recorder", "one")
    committed_items(telemetry, [item(subject, "e", traceparent)], AT)
    telemetry.close()
    assert not receiver.spans


@pytest.mark.parametrize(
    ("traceparent", "links"),
    [
        (tick_span("theirs", 1).traceparent(), [tuple(tick_span("theirs", 1))]),
        ("00-0-0-0", []),
        (None, []),
    ],
)
def test_a_request_says_who_asked(
    receiver: Receiver, traceparent: str | None, links: list[tuple[int, int]]
) -> None:
    session_id = UUID("019a2b3c-4d5e-7f60-8a7b-9c0d1e2f3a4b")
    sent = AT - timedelta(milliseconds=2)
    headers = Envelope(
        "asked", "session.requested.v1", "t", sent, traceparent=traceparent
    ).headers()
    message = Message(f"dsec.session.requested.{session_id}", headers, b"", 7, 1, AT, None)  # type: ignore[arg-type]
    telemetry = connect(Settings(otlp_endpoint=receiver.url, otel={}), "recorder", "one")
    committed_items(telemetry, [Item(message, Cold({"session_id": session_id.bytes}))], AT)
    telemetry.close()
    (span,) = receiver.of(session_id)
    assert (span.name, span.parent_id) == ("request", session_span(session_id).span_id)
    assert span.span_id == request_span(session_id, "asked").span_id
    assert (span.start_ns, span.end_ns) == (nanoseconds(sent), nanoseconds(AT))
    assert span.links == links
