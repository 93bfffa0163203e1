"""Events of a session's life: asked for, placed, started, released, ended."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AwareDatetime, Field, StringConstraints, model_validator

from dsec_contracts.envelope import Event, Part, Prose
from dsec_contracts.keys import Ordinal, SessionId, check_ordinal

SEED_MAX = 2**63 - 1
MAX_STEPS_MAX = 10**9
LAG_STEPS_MAX = 1024
"""How many steps a session may run ahead of its rewards: what they need is kept for so long."""

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 of canonical bytes, in hexadecimal."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
CancelCode = Literal["cancelled", "deadline"]
RejectCode = Literal[
    "malformed",
    "unregistered_spec",
    "wrong_spec_kind",
    "unregistered_policy",
    "id_in_use",
    "id_out_of_window",
    "not_implemented",
]
ShortText = Annotated[str, StringConstraints(max_length=256)]
HeartbeatPeriod = Annotated[float, Field(gt=0, le=60)]
"""Seconds between two heartbeats of a worker."""
LagSteps = Annotated[int, Field(ge=1, le=LAG_STEPS_MAX, strict=True)]
"""A number of steps: what was caused at step t is delivered before step t + this is decided."""


def _is_none(value: object) -> bool:
    """For fields that came later: who does not use one writes the bytes that were written before
    it."""
    return value is None


def check_lags(lag_steps: int | None, reward_lag_steps_max: int | None) -> None:
    """Refuse a pair that cannot be kept."""
    if lag_steps is None or reward_lag_steps_max is None:
        return
    if lag_steps > reward_lag_steps_max:
        raise ValueError(
            f"lag_steps: {lag_steps} is more than reward_lag_steps_max, {reward_lag_steps_max}"
        )


class RequestFact(Part):
    """What a session is. The first seven fields never change over its life."""

    session_id: SessionId
    agent_spec: Hash
    env_spec: Hash
    reward_fn_hash: Hash
    seed: Annotated[int, Field(ge=0, le=SEED_MAX, strict=True)]
    max_steps: Annotated[int, Field(ge=1, le=MAX_STEPS_MAX, strict=True)]
    """Environment steps over all episodes."""
    creation_timestamp: AwareDatetime
    policy: str | None = None
    """`name@version` of the pinned weights."""
    group_id: ShortText | None = None
    rollout_index: Annotated[int, Field(ge=0, le=SEED_MAX)] | None = None
    agent_stream: Annotated[int, Field(ge=0, le=SEED_MAX)] = 0
    """Which stream of the agent's own chance to use: rollouts of one group that share the
    environment's seed differ in this alone."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    deadline: AwareDatetime | None = None
    """The session is cancelled, code `deadline`, if it has not ended by then."""
    labels: dict[ShortText, ShortText] = Field(default_factory=dict, max_length=64)
    curriculum_level: int | None = None
    fork_parent: str | None = None
    lag_steps: Annotated[LagSteps | None, Field(exclude_if=_is_none)] = None
    """What step t caused (its reward, results of calls that do not block) is delivered exactly
    before step t + lag_steps is decided, and the session waits for it. None: a reward before the
    next step unless it is deferred, everything else as it comes."""
    reward_lag_steps_max: Annotated[LagSteps | None, Field(exclude_if=_is_none)] = None
    """A deferred reward of step t is delivered before step t + this is decided at the latest; the
    session waits for it. Where it or `lag_steps` is given, rewards of the session may be deferred;
    with `lag_steps` they come when that says."""

    @model_validator(mode="after")
    def _lags(self) -> Self:
        check_lags(self.lag_steps, self.reward_lag_steps_max)
        return self


class RequestCircumstance(Part):
    """Who asked."""

    client: ShortText | None = None


class SessionRequested(Event):
    """An upstream system asks for a session. Published once, acknowledged, and it runs."""

    fact: RequestFact
    circumstance: RequestCircumstance = RequestCircumstance()


class CancelFact(Part):
    """Which session should stop."""

    session_id: SessionId


class CancelCircumstance(Part):
    """Why, and by whom."""

    reason: ShortText | None = None
    code: CancelCode = "cancelled"


class SessionCancelRequested(Event):
    """Somebody asks that a session end. The first request counts."""

    fact: CancelFact
    circumstance: CancelCircumstance = CancelCircumstance()


class RejectFact(Part):
    """Why a request was not admitted."""

    event_id: str
    """`ce-id` of the rejected event."""
    code: RejectCode
    field: str | None = None
    session_id: str | None = None
    """As it was written, which need not be a session id."""


class RejectCircumstance(Part):
    """The sentence for people."""

    message: Prose = ""


class SessionRejected(Event):
    """The scheduler refuses a request. Logged under the request's event id, never the session."""

    fact: RejectFact
    circumstance: RejectCircumstance = RejectCircumstance()


class PlacedFact(Part):
    """One placement of a session on a worker."""

    session_id: SessionId
    attempt: Annotated[int, Field(ge=1), AfterValidator(check_ordinal)]
    worker: Name
    lane: Name
    previous_lane: Name | None = None
    stage: str = "main"
    alone: bool = False
    """The session shares its worker with no other: it is suspected of killing workers."""


class PlacedCircumstance(Part):
    """Why there, and the request itself, so that a worker can start without a query."""

    request: RequestFact
    reason: ShortText = "admitted"
    epoch: int | None = None
    """The epoch of the stream that the placement's position counts in. None: whoever placed it did
    not say."""
    heartbeat_period_s: Annotated[HeartbeatPeriod | None, Field(exclude_if=_is_none)] = None
    """How often the worker beats, where that is not what the scheduler is set to: a scheduler that
    takes over waits as long for its first heartbeat."""


class SessionPlaced(Event):
    """The scheduler gives a session to a worker. Published with the expected last sequence of its
    subject, so that of several racing schedulers one wins."""

    fact: PlacedFact
    circumstance: PlacedCircumstance


class StartedFact(Part):
    """The first reset. `chain` is chain_0."""

    session_id: SessionId
    reset: bytes
    """Canonical `[state_hash, observation_hash, info]`."""
    chain: bytes


class StartedCircumstance(Part):
    """Where and how it runs."""

    attempt: Ordinal = 1
    worker: str = ""
    determinism: Literal["D0", "D1", "D2"] = "D2"
    observation: bytes = b""
    """Canonical bytes of the first observation, or of a reference to it; empty for none."""
    fingerprint: dict[str, str] = Field(default_factory=dict)
    """What the result may depend on: versions, machine."""


class SessionStarted(Event):
    """The environment was reset for the first time."""

    fact: StartedFact
    circumstance: StartedCircumstance = StartedCircumstance()


class ReleasedFact(Part):
    """A worker gave an attempt up, in good order."""

    session_id: SessionId
    attempt: Ordinal


class ReleasedCircumstance(Part):
    """Why: drain, shutdown."""

    worker: str = ""
    steps: int = 0
    reason: ShortText = ""


class SessionReleased(Event):
    """A worker hands a live session back; it may be placed again."""

    fact: ReleasedFact
    circumstance: ReleasedCircumstance = ReleasedCircumstance()


class ResumedFact(Part):
    """The attempt that goes on where another one stopped."""

    session_id: SessionId
    attempt: Ordinal


class AnchorMiss(Part):
    """An anchor that a restart tried and did not use."""

    anchor_id: str
    position: int
    code: str
    """`blob_missing`, `blob_damaged`, `store_away`, `not_restorable`."""
    message: Prose = ""


class ResumedCircumstance(Part):
    """From where, and at what cost."""

    worker: str = ""
    anchor_id: str | None = None
    """The anchor that was loaded. None: it was re-executed from step 0."""
    from_step: int = 0
    """The first step that was executed again."""
    steps_recorded: int = 0
    """Steps that the log had of the attempts before."""
    misses: list[AnchorMiss] = Field(default_factory=list)


class SessionResumed(Event):
    """A session that has anchors was brought back after the loss of its worker."""

    fact: ResumedFact
    circumstance: ResumedCircumstance = ResumedCircumstance()


class EndedFact(Part):
    """How it ended. `chain` covers the last step's chain and this fact's other fields."""

    session_id: SessionId
    status: Literal["completed", "failed", "cancelled"]
    code: str
    """completed: `episodes_max` or `max_steps`; cancelled: `cancelled` or `deadline`; failed: the
    kind of failure."""
    steps: int
    episodes: int
    """Finished episodes."""
    inputs: bytes
    """Canonical `[[kind, ordinal, hash], ...]` delivered after the last step."""
    chain: bytes


class EndedCircumstance(Part):
    """The circumstances of the end."""

    attempt: Ordinal = 0
    worker: str = ""
    message: Prose = ""
    """For people: the error and where in the user's code it was raised."""
    at: datetime | None = None


class SessionEnded(Event):
    """A session is over. Final."""

    fact: EndedFact
    circumstance: EndedCircumstance = EndedCircumstance()
