"""Events of the reward service: a reward came, comes later, or will not come. Never a made-up 0."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from dsec_contracts.columns import VarColumn, check_columns
from dsec_contracts.envelope import Event, Part, Prose
from dsec_contracts.keys import SessionId, check_ordinal
from dsec_contracts.session import Hash, ShortText

CAUSE_BYTES = 16
"""Of the chain hash of a step: by its head a reward names the step that it is for."""
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
                "cause": (row.cause, CAUSE_BYTES),
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


class RewardMissingCircumstance(RewardNoticeCircumstance):
    """For people, and for whoever runs the function again."""

    responses: bytes | None = Field(default=None, exclude_if=lambda told: told is None)
    """What outside services did answer until then, as `reward.scored` has it. Null: nothing."""


class RewardDeferred(Event):
    """The reward of a step comes later."""

    fact: RewardNoticeFact
    circumstance: RewardNoticeCircumstance = RewardNoticeCircumstance()


class RewardMissing(Event):
    """The reward of a step will not come. Only the reward service says so."""

    fact: RewardNoticeFact
    circumstance: RewardMissingCircumstance = RewardMissingCircumstance()


REVISION_MIN = 2
"""Revision 1 is what the session's agent was given."""
UNSCORED_MAX = 64
"""Steps that one `reward.rescored` lists. All of them are counted."""

Revision = Annotated[int, Field(ge=REVISION_MIN), AfterValidator(check_ordinal)]


class RescoreFact(Part):
    """Which session, as which revision, by which function. Of several requests for one revision the
    first counts."""

    session_id: SessionId
    revision: Revision
    reward_fn_hash: Hash


class RescoreCircumstance(Part):
    """Who asked."""

    client: ShortText | None = None


class RewardRescoreRequested(Event):
    """Somebody asks that the rewards of a session that has ended be computed anew, from what is
    recorded of it. Neither agent nor environment runs, and what the agent was given stays."""

    fact: RescoreFact
    circumstance: RescoreCircumstance = RescoreCircumstance()


class Unscored(Part):
    """A step that the function gave no reward for."""

    step: Annotated[int, Field(ge=0), AfterValidator(check_ordinal)]
    code: str


class RescoredFact(Part):
    """What came of it. Steps without a reward of this revision keep that of the one before."""

    session_id: SessionId
    revision: Revision
    reward_fn_hash: Hash
    scored: Annotated[int, Field(ge=0), AfterValidator(check_ordinal)]
    unscored: Annotated[list[Unscored], Field(max_length=UNSCORED_MAX)]
    unscored_total: Annotated[int, Field(ge=0), AfterValidator(check_ordinal)]
    code: str = ""
    """Why nothing was scored at all: `not_ended`, `no_session`, `rewarded_by_step` (a function of
    whole episodes, and steps within them have rewards). Empty: it was."""


class RescoredCircumstance(Part):
    """For people."""

    replica: str = ""
    message: Prose = ""


class RewardRescored(Event):
    """The rewards of a session were computed anew. Its new ones came before, as `reward.scored`."""

    fact: RescoredFact
    circumstance: RescoredCircumstance = RescoredCircumstance()
