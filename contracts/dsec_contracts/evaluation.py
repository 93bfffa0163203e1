"""Events of the evaluator: what an agent said about its own decisions, held against the log."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from dsec_contracts.envelope import Event, Part
from dsec_contracts.keys import SessionId, check_ordinal
from dsec_contracts.session import Hash, ShortText

CONFIDENCE_BINS = 10
"""Of equal width over 0 to 1; a confidence of 1 is in the last."""
UNKNOWN_CALLS_MAX = 64
"""Listed in one event. All of them are counted."""

Count = Annotated[int, Field(ge=0), AfterValidator(check_ordinal)]
PerBin = Annotated[list[Count], Field(min_length=CONFIDENCE_BINS, max_length=CONFIDENCE_BINS)]
SumPerBin = Annotated[list[float], Field(min_length=CONFIDENCE_BINS, max_length=CONFIDENCE_BINS)]


class UnknownCall(Part):
    """A step whose provenance names a tool call that had not happened by then."""

    step: Count
    tool_call_id: ShortText


class PolicySanityFact(Part):
    """One session that has ended. Rewards are those that its agent was given, not revised ones."""

    session_id: SessionId
    agent_spec: Hash
    steps: Count
    with_provenance: Count
    """Steps whose action came with provenance."""
    provenance_malformed: Count = 0
    """Steps whose provenance is no mapping, or has a confidence outside 0 to 1."""
    tool_calls: Count
    tool_calls_without_provenance: Count
    """Calls that no later step names."""
    unknown_calls: Annotated[list[UnknownCall], Field(max_length=UNKNOWN_CALLS_MAX)]
    unknown_calls_total: Count
    confident: PerBin
    """Per bin of confidence: steps that gave one and have a finite reward."""
    confidence_sum: SumPerBin
    reward_sum: SumPerBin
    confidence_square_sum: float = 0.0
    """Over all bins, as are the two below: with these, correlations add up over sessions."""
    reward_square_sum: float = 0.0
    product_sum: float = 0.0
    reward_min: float | None = None
    reward_max: float | None = None


class PolicySanityCircumstance(Part):
    """Who checked."""

    replica: str = ""


class PolicySanityChecked(Event):
    """The provenance that a session's agent gave was held against what happened."""

    fact: PolicySanityFact
    circumstance: PolicySanityCircumstance = PolicySanityCircumstance()
