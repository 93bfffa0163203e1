"""Events of tools: a session called some, and what came of each call.

One `tool.called` is one turn: all the calls of one decision, in the shape in which OpenAI's API has
them. Each of them gets one answer, `tool.returned` or `tool.failed`, under one natural key: the
first counts.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from dsec_contracts.envelope import Event, Part, Prose
from dsec_contracts.keys import (
    CALLS_PER_TURN_MAX,
    TURNS_PER_STEP_MAX,
    SessionId,
    check_ordinal,
)
from dsec_contracts.session import Hash

Step = Annotated[int, Field(ge=0), AfterValidator(check_ordinal)]
Turn = Annotated[int, Field(ge=0, le=TURNS_PER_STEP_MAX)]
"""Counted from 0 at each environment step."""
Index = Annotated[int, Field(ge=0, lt=CALLS_PER_TURN_MAX)]
"""The place of a call in its turn."""


class _Grown(Part):
    """A part with fields that came later: at their defaults they are not written, so that what does
    not use them is written as it always was."""

    later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        told: dict[str, Any] = serialize(self)
        for name in self.later:
            if getattr(self, name) == type(self).model_fields[name].default:
                told.pop(name, None)
        return told


class ToolFunction(Part):
    """What is called, and with what."""

    name: str
    arguments: str
    """A JSON object, as text: as the agent gave it, so it need not be valid."""


class ToolCall(Part):
    """One entry of `tool_calls`."""

    id: str
    """`call_{step}_{turn}_{index}`."""
    type: Literal["function"] = "function"
    function: ToolFunction


class ToolCalledFact(Part):
    """One turn of a session."""

    session_id: SessionId
    step: Step
    """The environment step that the agent was about to decide, or decided with these calls."""
    turn: Turn
    inputs: bytes
    """Canonical `[[kind, ordinal, hash], ...]`: delivered since the output before it. The step
    that follows names them again, since the chain has steps and no turns."""
    calls: Annotated[list[ToolCall], Field(min_length=1, max_length=CALLS_PER_TURN_MAX)]
    turn_hash: bytes
    """16 bytes: of the chain and of this turn. A result is delivered only if it names it."""


class ToolUse(_Grown):
    """How a session uses one of its tools."""

    later = ("calls_before",)

    spec: Hash
    deadline_s: float
    calls_before: int = 0
    """Calls of this tool that the session made before this turn."""


class ToolCalledCircumstance(_Grown):
    """Who asked, where the answers go, and what is needed to give them."""

    later = ("calls_before", "calls_max")

    worker: str = ""
    lane: str = ""
    attempt: int = 0
    again: bool = False
    """True where the call may have been published before: by this attempt or an earlier one."""
    tools: dict[str, ToolUse] = Field(default_factory=dict)
    """By the names that the calls use."""
    calls_before: int = 0
    """Calls of any tool that the session made before this turn."""
    calls_max: int | None = None
    """How many it may make in all."""


class ToolCalled(Event):
    """An agent called tools."""

    fact: ToolCalledFact
    circumstance: ToolCalledCircumstance = ToolCalledCircumstance()


class ToolAnswerCircumstance(_Grown):
    """Who answered, where, and how long the call took."""

    later = ("attempts",)

    lane: str = ""
    replica: str = ""
    tool: str = ""
    seconds: float | None = None
    attempts: int = 0
    """How often the call was made; 0 where that is not known."""


class ToolBegunFact(Part):
    """The call."""

    session_id: SessionId
    step: Step
    turn: Turn
    index: Index


class ToolBegun(Event):
    """A call that must not be made twice is about to be made.

    Without an answer behind it nobody knows whether it was: the call is not made again."""

    fact: ToolBegunFact
    circumstance: ToolAnswerCircumstance = ToolAnswerCircumstance()


class ToolRetriedFact(Part):
    """The call, and which attempt it was."""

    session_id: SessionId
    step: Step
    turn: Turn
    index: Index
    attempt: Annotated[int, Field(ge=1)]
    """From 1. A replica that takes a call over begins anew."""


class ToolRetriedCircumstance(Part):
    """Why the attempt failed, and how long the next one waits."""

    replica: str = ""
    tool: str = ""
    code: str = ""
    message: Prose = ""
    pause_s: float = 0.0


class ToolRetried(Event):
    """An attempt of a call failed, and another follows. No session hears of it."""

    fact: ToolRetriedFact
    circumstance: ToolRetriedCircumstance = ToolRetriedCircumstance()


class ToolReturnedFact(_Grown):
    """The call, and its result."""

    later = ("blob",)

    session_id: SessionId
    step: Step
    turn: Turn
    index: Index
    content: bytes
    """The canonical encoding of what the tool returned; empty where it lies in the object store."""
    turn_hash: bytes
    """16 bytes, from the call."""
    blob: Hash | None = None
    """SHA-256 of the canonical encoding, in hexadecimal digits: its name in the object store."""


class ToolReturned(Event):
    """A tool returned."""

    fact: ToolReturnedFact
    circumstance: ToolAnswerCircumstance = ToolAnswerCircumstance()


class ToolFailedFact(Part):
    """The call, and why it has no result. The agent is told all of it."""

    session_id: SessionId
    step: Step
    turn: Turn
    index: Index
    code: str
    """`arguments_invalid`, `deadline`, `outcome_unknown`, `quota`, `tool_raised`, ..."""
    message: Prose = ""
    retryable: bool = False
    """Whether a call with the same arguments might do better."""
    turn_hash: bytes
    """16 bytes, from the call."""


class ToolFailed(Event):
    """A call has no result, and will have none."""

    fact: ToolFailedFact
    circumstance: ToolAnswerCircumstance = ToolAnswerCircumstance()
