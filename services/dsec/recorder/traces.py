"""Spans of what is durable: one for each message of a tick, from the stream to the commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from dsec.platform.clock import nanoseconds
from dsec.platform.telemetry import Span, Telemetry, parse_traceparent
from dsec.platform.telemetry.ids import child
from dsec.recorder.effects import Item
from dsec_contracts import RewardScored, SessionStepped, subjects

_OF_TICKS = tuple(
    subjects.every(event.event_name()).removesuffix("*") for event in (SessionStepped, RewardScored)
)
"""Others carry the header of whoever asked for a session, whose trace is not ours."""


def committed_ticks(telemetry: Telemetry, items: Sequence[Item], committed: datetime) -> None:
    """A batch is in the log: send the spans of its steps and rewards whose ticks are traced."""
    if not telemetry.enabled:
        return
    for message in (item.message for item in items):
        header = message.headers.get("traceparent")
        tick = parse_traceparent(header) if message.subject.startswith(_OF_TICKS) else None
        if tick is None or not telemetry.keeps(tick.trace_id):
            continue
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
