"""Spans of what is durable: one for each message of a tick, from the stream to the commit, and one
for each request.

A request's span carries the link to whoever asked. The recorder sends it, since it alone sees every
message with its headers: the log does not keep them, and a scheduler that starts may find requests
in the log already.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from dsec.platform.bus import Message
from dsec.platform.clock import nanoseconds
from dsec.platform.telemetry import Span, Telemetry, parse_traceparent
from dsec.platform.telemetry.ids import child, request_span, session_span
from dsec.recorder.effects import Item
from dsec.recorder.intake import Cold
from dsec_contracts import RewardScored, SessionRequested, SessionStepped, subjects

_OF_TICKS = tuple(subjects.start(event.event_name()) for event in (SessionStepped, RewardScored))
"""Others carry the header of whoever asked for a session, whose trace is not ours."""
_REQUESTS = subjects.start(SessionRequested.event_name())


def committed_items(telemetry: Telemetry, items: Sequence[Item], committed: datetime) -> None:
    """A batch is in the log: send the spans of what is traced of it."""
    if not telemetry.enabled:
        return
    for item in items:
        subject = item.message.subject
        if subject.startswith(_OF_TICKS):
            _of_tick(telemetry, item.message, committed)
        elif subject.startswith(_REQUESTS) and isinstance(item.reading, Cold):
            _requested(telemetry, item.message, item.reading.row["session_id"])


def _of_tick(telemetry: Telemetry, message: Message, committed: datetime) -> None:
    tick = parse_traceparent(message.headers.get("traceparent"))
    if tick is None or not telemetry.keeps(tick.trace_id):
        return
    telemetry.emit(
        Span(
            child(tick.trace_id, "commit", message.headers.get("ce-id")),
            "commit",
            nanoseconds(message.time),
            nanoseconds(committed),
            tick,
            {"dsec.subject": message.subject, "dsec.position": message.sequence},
        )
    )


def _requested(telemetry: Telemetry, message: Message, raw_id: bytes) -> None:
    session_id = UUID(bytes=raw_id)
    if not telemetry.keeps(session_id.int):
        return
    envelope = message.envelope()
    upstream = parse_traceparent(envelope.traceparent)
    telemetry.emit(
        Span(
            request_span(session_id, envelope.id),
            "request",
            nanoseconds(envelope.time),
            nanoseconds(message.time),
            session_span(session_id),
            {
                "dsec.session.id": str(session_id),
                "dsec.event.id": envelope.id,
                "dsec.position": message.sequence,
            },
            (upstream,) if upstream else (),
        )
    )
