"""The span of an anchor: in its session's trace, from the stream to what became of the blob."""

from __future__ import annotations

from datetime import datetime

from dsec.anchor_sync.effects import Lost, Stored
from dsec.platform.clock import nanoseconds
from dsec.platform.telemetry import Span, Telemetry
from dsec.platform.telemetry.ids import anchor_span, placement_span
from dsec_contracts import AnchorCaptured


def settled(
    telemetry: Telemetry,
    captured: AnchorCaptured,
    outcome: Stored | Lost,
    captured_at: datetime,
    now: datetime,
) -> None:
    """An anchor is stored or lost, and that is said: send its span."""
    fact, told = captured.fact, captured.circumstance
    if not telemetry.keeps(fact.session_id.int):
        return
    lost = f"{outcome.code}: {outcome.message}" if isinstance(outcome, Lost) else None
    telemetry.emit(
        Span(
            anchor_span(fact.session_id, fact.position),
            "anchor",
            nanoseconds(captured_at),
            nanoseconds(now),
            placement_span(fact.session_id, told.attempt),
            {
                "dsec.anchor.id": fact.anchor_id,
                "dsec.anchor.position": fact.position,
                "dsec.anchor.bytes": told.size_bytes,
            },
            error=lost,
        )
    )
