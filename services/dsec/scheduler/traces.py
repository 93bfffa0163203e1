"""Spans of sessions and placements, as the stream shows them.

The scheduler sends these, whoever publishes the events: it sees all of them, and when a worker dies
it is the one that is left to say how long the attempt lasted and what ended it. Times are those
that the events carry and ids follow from what a span is about, so what is sent again after a crash
is the same span, not a second one. In good order nothing is: a scheduler goes on behind what the
one before it acknowledged, and takes from the log what happened while there was none.

Kept in memory is what a span needs from an earlier event, of sessions whose traces are kept only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from dsec.platform.bus import BadMessage, Message
from dsec.platform.clock import nanoseconds
from dsec.platform.telemetry import Span, SpanRef, Telemetry, parse_traceparent
from dsec.platform.telemetry.ids import placement_span, session_span
from dsec.scheduler.intake import Reading, Requested
from dsec_contracts import keys
from dsec_contracts.envelope import Event
from dsec_contracts.session import (
    SessionEnded,
    SessionPlaced,
    SessionRejected,
    SessionReleased,
)
from dsec_contracts.worker import WorkerFenced

SESSIONS_OPEN_MAX = 200_000
"""Sessions that something is kept of; of older ones the root loses its link and attempts."""


@dataclass(slots=True)
class _Open:
    """What is kept of a session that has not ended."""

    upstream: SpanRef | None = None
    attempts: int = 0
    worker: str = ""
    placed_ns: int = 0
    """0: no worker has it."""


class Traces:
    """Spans of all sessions whose traces are kept."""

    def __init__(self, telemetry: Telemetry, closed: Container[UUID]) -> None:
        """Args:
        closed: sessions that are known to have ended: of several ends the first counts.
        """
        self._telemetry = telemetry
        self._closed = closed
        self._open: OrderedDict[UUID, _Open] = OrderedDict()
        self._on_worker: dict[str, set[UUID]] = {}
        self._told_until: int | None = None

    def follow(self, told_until: int | None) -> None:
        """Say how far in the stream another scheduler has got; None: there was none."""
        self._told_until = told_until

    def start(self, floor: int) -> int:
        """The log ends at `floor`. Returns up to where spans were sent; where there was no other
        scheduler, what is in the log already is history."""
        if self._told_until is None or not self._telemetry.enabled:
            self._told_until = floor
        return self._told_until

    def _is_told(self, sequence: int) -> bool:
        return self._told_until is not None and sequence <= self._told_until

    def seen(self, message: Message, reading: Reading) -> None:
        """An event of the stream, before it is taken into the state."""
        if not self._telemetry.enabled:
            return
        try:
            envelope = message.envelope()
        except BadMessage:
            return  # `intake.read` says so, and rejects it where it is a request
        if isinstance(reading, Requested):
            upstream = parse_traceparent(envelope.traceparent)
            self._requested(reading, upstream)
        elif isinstance(reading, Event):
            self.take(reading, envelope.time, message.sequence)

    def take(self, event: Event, time: datetime, sequence: int) -> None:
        """An event, from the log or the stream."""
        if not self._telemetry.enabled:
            return
        if not self._is_told(sequence):
            self._tell(event, nanoseconds(time))
            return
        match event:
            case SessionPlaced():
                self._placed(event, nanoseconds(time))
            case SessionReleased(fact=fact):
                self._off_worker(fact.session_id)
            case WorkerFenced(fact=fenced):
                for session_id in self._on_worker.get(fenced.worker, set()).copy():
                    self._off_worker(session_id)
            case SessionEnded(fact=ended):
                self._forget(ended.session_id)
            case SessionRejected():
                self._rejected(event)

    def _tell(self, event: Event, at_ns: int) -> None:
        match event:
            case SessionPlaced():
                self._placed(event, at_ns)
            case SessionReleased(fact=released, circumstance=told):
                self._placement_over(released.session_id, at_ns, f"released: {told.reason}", None)
            case WorkerFenced(fact=fenced):
                for session_id in self._on_worker.get(fenced.worker, set()).copy():
                    why = f"worker fenced: {fenced.reason}"
                    self._placement_over(session_id, at_ns, why, why)
            case SessionEnded():
                self._ended(event, at_ns)
            case SessionRejected():
                self._rejected(event)

    # -- requests ------------------------------------------------------------------------------

    def _requested(self, asked: Requested, upstream: SpanRef | None) -> None:
        session_id = asked.event.fact.session_id
        if self._telemetry.keeps(session_id.int) and session_id not in self._closed:
            known = self._entry(session_id)
            known.upstream = known.upstream or upstream

    def _rejected(self, event: SessionRejected) -> None:
        """A session that will never be: nothing ends it, so nothing must be kept of it."""
        fact = event.fact
        if fact.code in ("malformed", "id_in_use"):
            return  # says nothing of the session that has the id
        try:
            self._forget(UUID(fact.session_id or ""))
        except ValueError:
            return

    # -- placements ----------------------------------------------------------------------------

    def _placed(self, event: SessionPlaced, at_ns: int) -> None:
        fact = event.fact
        if not self._telemetry.keeps(fact.session_id.int) or fact.session_id in self._closed:
            return
        self._off_worker(fact.session_id)
        known = self._entry(fact.session_id)
        known.attempts, known.worker, known.placed_ns = fact.attempt, fact.worker, at_ns
        self._on_worker.setdefault(fact.worker, set()).add(fact.session_id)

    def _placement_over(self, session_id: UUID, at_ns: int, why: str, error: str | None) -> None:
        known = self._open.get(session_id)
        if known is None or not known.placed_ns:
            return
        self._telemetry.emit(
            Span(
                placement_span(session_id, known.attempts),
                "placement",
                known.placed_ns,
                at_ns,
                session_span(session_id),
                {
                    "dsec.attempt": known.attempts,
                    "dsec.worker": known.worker,
                    "dsec.placement.end": why,
                },
                error=error,
            )
        )
        self._off_worker(session_id)

    def _off_worker(self, session_id: UUID) -> None:
        known = self._open.get(session_id)
        if known is None or not known.placed_ns:
            return
        sessions = self._on_worker[known.worker]
        sessions.discard(session_id)
        if not sessions:
            del self._on_worker[known.worker]
        known.placed_ns = 0

    # -- ends ----------------------------------------------------------------------------------

    def _ended(self, event: SessionEnded, at_ns: int) -> None:
        fact = event.fact
        session_id = fact.session_id
        if not self._telemetry.keeps(session_id.int) or session_id in self._closed:
            return
        error = fact.code if fact.status == "failed" else None
        self._placement_over(session_id, at_ns, f"ended: {fact.code}", error)
        known = self._open.get(session_id, _Open())
        self._telemetry.emit(
            Span(
                session_span(session_id),
                "session",
                # The id's own time: no scheduler has to remember it.
                nanoseconds(keys.session_time(session_id)),
                at_ns,
                None,
                {
                    "dsec.session.id": str(session_id),
                    "dsec.session.status": fact.status,
                    "dsec.session.code": fact.code,
                    "dsec.session.steps": fact.steps,
                    "dsec.session.episodes": fact.episodes,
                    "dsec.session.attempts": max(known.attempts, event.circumstance.attempt),
                },
                (known.upstream,) if known.upstream else (),
                error,
            )
        )
        self._forget(session_id)

    # -- memory --------------------------------------------------------------------------------

    def _entry(self, session_id: UUID) -> _Open:
        known = self._open.get(session_id)
        if known is None:
            known = self._open[session_id] = _Open()
            if len(self._open) > SESSIONS_OPEN_MAX:
                self._forget(next(iter(self._open)))
        return known

    def _forget(self, session_id: UUID) -> None:
        self._off_worker(session_id)
        self._open.pop(session_id, None)
