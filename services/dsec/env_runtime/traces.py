"""Spans of a lane: one a tick, and one a step of the sessions that ask for it.

A tick steps many sessions, so its span lies in a trace of its own, which the reward service and the
recorder go on with, and links to the attempts of some of them. A session that is labelled
`dsec.trace: steps` has a span for each of its steps in its own trace, from the step to the answer,
with a link to the tick; only such sessions cost anything per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from dsec.env_runtime.seats import Seat
from dsec.platform.clock import now_ns
from dsec.platform.telemetry import LINKS_MAX, Span, SpanRef, Telemetry
from dsec.platform.telemetry.ids import placement_span, start_span, step_span, tick_span
from dsec.session.io import Stepped
from dsec_contracts.session import PlacedFact, RequestFact

TRACE_LABEL = "dsec.trace"
STEPS = "steps"


def asks_for_steps(telemetry: Telemetry, request: RequestFact) -> bool:
    """Whether a session has a span for each of its steps."""
    return request.labels.get(TRACE_LABEL) == STEPS and telemetry.keeps(request.session_id.int)


def started(telemetry: Telemetry, placed: PlacedFact, start_ns: int, error: str | None) -> None:
    """An attempt is live, or will not be: send the span of its way there."""
    if not telemetry.keeps(placed.session_id.int):
        return
    telemetry.emit(
        Span(
            start_span(placed.session_id, placed.attempt),
            "start",
            start_ns,
            now_ns(),
            placement_span(placed.session_id, placed.attempt),
            {"dsec.attempt": placed.attempt, "dsec.worker": placed.worker},
            error=error,
        )
    )


class _Step(NamedTuple):
    """A step that waits for its answer."""

    stepped: Stepped
    start_ns: int
    tick: SpanRef


class LaneTraces:
    """Spans of one lane."""

    def __init__(self, telemetry: Telemetry, lane: str) -> None:
        self._telemetry = telemetry
        self._lane = lane
        self._began_ns = 0
        self._waiting: dict[bytes, _Step] = {}

    def begin(self) -> None:
        """A tick begins."""
        if self._telemetry.enabled:
            self._began_ns = now_ns()

    def tick(self, number: int) -> SpanRef | None:
        """The span of the tick that is about to be published; None: it is not kept."""
        if not self._telemetry.enabled:
            return None
        ref = tick_span(self._lane, number)
        return ref if self._telemetry.keeps(ref.trace_id) else None

    def stepped(self, number: int, taken: Iterable[tuple[Seat, Stepped]]) -> None:
        """Before a tick is published: an answer may come before its acknowledgement."""
        tick = tick_span(self._lane, number)
        for seat, stepped in taken:
            if seat.trace_steps:
                self._waiting[seat.raw_id] = _Step(stepped, seat.step_began_ns, tick)

    def published(self, tick: SpanRef, taken: list[tuple[Seat, Stepped]], *, again: bool) -> None:
        """A tick was published and acknowledged: send its span."""
        end_ns = now_ns()
        self._telemetry.emit(
            Span(
                tick,
                "tick",
                end_ns if again else self._began_ns,
                end_ns,
                None,
                {"dsec.lane": self._lane, "dsec.rows": len(taken), "dsec.again": again},
                tuple(islice(self._placements(taken), LINKS_MAX)),
            )
        )

    def _placements(self, taken: list[tuple[Seat, Stepped]]) -> Iterator[SpanRef]:
        """The attempts whose traces are kept; first those that link to the tick themselves."""
        seats = [seat for seat, _ in taken]
        for seat in sorted(seats, key=lambda seat: not seat.trace_steps):
            session_id = seat.placed.session_id
            if self._telemetry.keeps(session_id.int):
                yield placement_span(session_id, seat.placed.attempt)

    def answered(self, seat: Seat, error: str | None = None) -> None:
        """A session that asks for its steps has the answer to its last one, or will not get it."""
        step = self._waiting.pop(seat.raw_id, None)
        if step is None:
            return
        session_id, stepped = seat.placed.session_id, step.stepped
        kept = self._telemetry.keeps(step.tick.trace_id)
        self._telemetry.emit(
            Span(
                step_span(session_id, stepped.step),
                "step",
                step.start_ns,
                now_ns(),
                placement_span(session_id, seat.placed.attempt),
                {
                    "dsec.step": stepped.step,
                    "dsec.episode": stepped.episode,
                    "dsec.terminated": bool(stepped.terminated),
                    "dsec.truncated": bool(stepped.truncated),
                },
                (step.tick,) if kept else (),
                error,
            )
        )
