"""Spans of what is durable: in the traces of ticks, and in nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from tests.otlp import Receiver

from dsec.platform.bus import Message
from dsec.platform.clock import nanoseconds
from dsec.platform.settings import Settings
from dsec.platform.telemetry import connect
from dsec.platform.telemetry.ids import child, tick_span
from dsec.recorder.effects import Item
from dsec.recorder.intake import Unfit
from dsec.recorder.traces import committed_ticks

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
    committed_ticks(telemetry, [item(subject, "e", tick.traceparent())], committed)
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
    committed_ticks(telemetry, [item(subject, "e", traceparent)], AT)
    telemetry.close()
    assert not receiver.spans
