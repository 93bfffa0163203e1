"""What a turn asks of the service: its calls, each with what is needed to make and to answer it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dsec.platform.bus import BadMessage, Message
from dsec.platform.bus.stream import DUPLICATE_WINDOW_S
from dsec_contracts import ToolCalled, keys, subjects
from dsec_contracts.tool import ToolUse


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of a turn, with what is needed to make it and to answer it."""

    session_id: UUID
    step: int
    turn: int
    index: int
    turn_hash: bytes
    name: str
    arguments: str
    use: ToolUse | None
    lane: str
    sequence: int
    """The position of the turn in the stream."""
    delivery: str
    """This delivery of it, unlike all others."""
    maybe_made: bool
    """Whether somebody may have had this call before."""
    traceparent: str | None
    attempt: int
    """The session's, which the call belongs to; 0: it does not say."""
    number: int
    """Which call of the tool it is in its session, from 0."""
    total: int
    """Which call of any tool."""
    total_max: int | None
    """How many calls the session may make in all."""

    @property
    def id(self) -> str:
        """As the agent knows it."""
        return keys.call_id(self.step, self.turn, self.index)

    @property
    def key(self) -> str:
        """The idempotency key: the same for every attempt, another for every call there is."""
        return keys.of(self.session_id, self.id)

    def about(self) -> dict[str, Any]:
        """What every fact about the call begins with."""
        return {
            "session_id": self.session_id,
            "step": self.step,
            "turn": self.turn,
            "index": self.index,
        }


def may_be_made(
    stored: datetime, sent: datetime, delivered: int, age_s: float, sure_s: float, *, again: bool
) -> bool:
    """Whether calls of a message may have been made before: then what is known of them is asked
    for, which costs a wait for the log.

    Its lane says so where it asks again, and the server where it delivers again. A message that
    was sent again after the server's duplicate window is another message and looks like the first;
    it was stored long after it was made. And one that lay at a process that was held up has been
    another's meanwhile, though this is its first delivery.

    Args:
        age_s: since it was stored, by the clocks of both machines.
        sure_s: what is younger nobody else can have had yet.
    """
    late = (stored - sent).total_seconds() > DUPLICATE_WINDOW_S / 2
    return again or delivered > 1 or late or abs(age_s) > sure_s


def asked_by(message: Message, now: datetime, sure_s: float) -> list[Asked]:
    """The calls of a turn.

    Args:
        sure_s: see `may_be_made`.

    Raises:
        BadMessage: it is none.
    """
    event = message.event_of(ToolCalled)
    fact, told = event.fact, event.circumstance
    envelope = message.envelope()
    age_s = (now - message.time).total_seconds()
    maybe_made = may_be_made(
        message.time, envelope.time, message.delivered, age_s, sure_s, again=told.again
    )
    try:
        subjects.token(told.lane)
    except ValueError as error:
        raise BadMessage(f"circumstance.lane: {error}") from error
    names = [call.function.name for call in fact.calls]
    return [
        Asked(
            fact.session_id,
            fact.step,
            fact.turn,
            index,
            fact.turn_hash,
            call.function.name,
            call.function.arguments,
            use := told.tools.get(call.function.name),
            told.lane,
            message.sequence,
            f"{message.sequence}.{message.delivered}",
            maybe_made,
            envelope.traceparent,
            told.attempt,
            (use.calls_before if use is not None else 0) + names[:index].count(names[index]),
            told.calls_before + index,
            told.calls_max,
        )
        for index, call in enumerate(fact.calls)
    ]
