"""Names of spans. Pure.

A span's name in the protocol is a trace id and a span id, and both follow here from what the span
is about; none is drawn at random. Reasons:

* A session's trace id is its session id, so whoever has a session id has its trace.
* A parent can be named without being asked: a worker knows which placement it works for and the
  reward service which tick it scores, and neither waits for a span of another process.
* What is done again after a crash (a message handled twice, a scheduler that takes over) gives the
  same span, not a second one beside it.

Nothing that is hashed or compared comes from here, and nothing here reaches user code.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NamedTuple
from uuid import UUID

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_TRACE_ID_BYTES = 16
_SPAN_ID_BYTES = 8


class SpanRef(NamedTuple):
    """A span's name: 128 and 64 bits, neither of them 0."""

    trace_id: int
    span_id: int

    def traceparent(self) -> str:
        """As a W3C header. Only spans that are kept are named in one, so it says `sampled`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


def parse_traceparent(text: str | None) -> SpanRef | None:
    """The span that a W3C header names; None: there is none, or it is malformed.

    Anybody may send one, so a malformed header costs a link and nothing else.
    """
    found = _TRACEPARENT.fullmatch(text or "")
    if found is None or (found[1] == "00" and found[4]):  # only later versions may say more
        return None
    ref = SpanRef(int(found[2], 16), int(found[3], 16))
    return ref if ref.trace_id and ref.span_id else None


def session_span(session_id: UUID) -> SpanRef:
    """The root of a session's trace."""
    return child(session_id.int, "session", 0)


def request_span(session_id: UUID, event_id: str) -> SpanRef:
    """One request for a session."""
    return child(session_id.int, "request", event_id)


def placement_span(session_id: UUID, attempt: int) -> SpanRef:
    """One attempt, from its placement to its end."""
    return child(session_id.int, "placement", attempt)


def start_span(session_id: UUID, attempt: int) -> SpanRef:
    """An attempt's way to its first step: code loaded, reset, steps of earlier attempts redone."""
    return child(session_id.int, "start", attempt)


def step_span(session_id: UUID, step: int) -> SpanRef:
    """One step. Named without the attempt, as its key in the log is."""
    return child(session_id.int, "step", step)


def anchor_span(session_id: UUID, position: int) -> SpanRef:
    """One anchor. Named without the attempt, as its key in the log is."""
    return child(session_id.int, "anchor", position)


def tool_span(session_id: UUID, step: int, turn: int, index: int) -> SpanRef:
    """One tool call. Named without the attempt, as its key in the log is."""
    return child(session_id.int, "tool", f"{step}.{turn}.{index}")


def tick_span(lane: str, tick: int) -> SpanRef:
    """The root of a tick's trace. A tick belongs to many sessions, so it has a trace of its own."""
    trace_id = _hash(_TRACE_ID_BYTES, f"tick.{lane}.{tick}".encode())
    return child(trace_id, "tick", 0)


def child(trace_id: int, kind: str, ordinal: object) -> SpanRef:
    """A span within a trace, by what it is and which one of those."""
    told = trace_id.to_bytes(_TRACE_ID_BYTES, "big") + f"{kind}.{ordinal}".encode()
    return SpanRef(trace_id, _hash(_SPAN_ID_BYTES, told))


def _hash(size_bytes: int, told: bytes) -> int:
    # 0 is no id in the protocol.
    return int.from_bytes(blake2b(told, digest_size=size_bytes).digest(), "big") or 1
