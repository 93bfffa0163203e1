"""Events of the reward service: a reward came, comes later, or will not come. Never a made-up 0."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from dsec_contracts.columns import VarColumn, check_columns
from dsec_contracts.envelope import Event, Part, Prose
from dsec_contracts.keys import SessionId, check_ordinal

REWARD_FIELDS = (
    "step",  # int: the step that is rewarded
    "revision",  # int, from 1
    "value",  # float: the weighted total
    "components",  # {name: [score, weight]}
    "cause",  # 16 bytes: the head of the chain hash of the step that is rewarded
)


RESPONSE_FIELDS = (
    "service",  # its name
    "method",  # GET, POST, ...
    "path",  # below its base URL
    "request_hash",  # 16 bytes: of the canonical [params, json]
    "ordinal",  # int, from 0 among equal requests of one step
    "status",  # int: the HTTP status
    "headers",  # {lower-case name: value}: those that say how to read the body
    "body",  # bytes
)


class RewardColumns(Part):
    """Parallel arrays over the rewards of one tick."""

    session_id: bytes
    """16 bytes a row."""
    step: bytes
    """int32 a row, as is `revision`."""
    revision: bytes
    value: bytes
    """float64 a row, also in the fact."""
    cause: bytes
    """16 bytes a row: head of the chain hash of the step; delivered only if it matches."""
    fact: VarColumn
    """Canonical array of `REWARD_FIELDS`."""
    responses: VarColumn | None = Field(default=None, exclude_if=lambda column: column is None)
    """What outside services answered, from which the reward can be computed anew: a canonical
    array of `RESPONSE_FIELDS` rows in the order in which they were asked, or a reference to a blob
    that holds it; empty where none was asked. Null: none was in the whole message."""


class RewardCircumstance(Part):
    """One batch's circumstances."""

    replica: str = ""
    lane: str = ""


class RewardScored(Event):
    """Steps got their rewards."""

    columns: ClassVar[bool] = True

    rows: int
    row: RewardColumns
    circumstance: RewardCircumstance = RewardCircumstance()

    @model_validator(mode="after")
    def _check(self) -> Self:
        row = self.row
        check_columns(
            self.rows,
            {
                "session_id": (row.session_id, 16),
                "step": (row.step, 4),
                "revision": (row.revision, 4),
                "value": (row.value, 8),
                "cause": (row.cause, 16),
            },
            {"fact": row.fact} | ({"responses": row.responses} if row.responses else {}),
        )
        return self


class RewardNoticeFact(Part):
    """The step it is about, and why."""

    session_id: SessionId
    step: Annotated[int, Field(ge=0), AfterValidator(check_ordinal)]
    code: str
    """`reward_raised`, `reward_invalid`, `service_unavailable`, ..."""
    fatal: bool = False
    """True where the session cannot go on: the reward function itself is broken."""
    cause: bytes = b""
    """Head of the chain hash of the step."""


class RewardNoticeCircumstance(Part):
    """For people."""

    message: Prose = ""
    lane: str = ""


class RewardDeferred(Event):
    """The reward of a step comes later."""

    fact: RewardNoticeFact
    circumstance: RewardNoticeCircumstance = RewardNoticeCircumstance()


class RewardMissing(Event):
    """The reward of a step will not come. Only the reward service says so."""

    fact: RewardNoticeFact
    circumstance: RewardNoticeCircumstance = RewardNoticeCircumstance()
