"""Events about the curriculum: at which level a session's environment is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dsec_contracts.envelope import Event, Part
from dsec_contracts.keys import SessionId, check_ordinal
from dsec_contracts.session import Name

LEVEL_MAX = 1_000_000
ChangeReason = Literal["rewards_lag", "rewards_recovered", "threshold"]

Level = Annotated[int, Field(ge=0, le=LEVEL_MAX, strict=True)]
"""A level of an environment: what it means is the environment's own; 0 is the easiest."""


class CurriculumFact(Part):
    """Which level a session is given, from its next episode on."""

    session_id: SessionId
    n: Annotated[int, Field(ge=1, strict=True), AfterValidator(check_ordinal)]
    """The changes of a session count from 1."""
    level: Level
    previous_level: Level
    """What the change before said, or the request."""


class CurriculumCircumstance(Part):
    """Why, and the numbers that it was decided by."""

    why: ChangeReason
    lane: Name | None = None
    """Where the session was."""
    lag_steps: int | None = None
    """How many steps its oldest outstanding reward was behind."""
    for_s: float | None = None
    """How long that had been too much, or little again."""
    episodes: int | None = None
    """Episodes of the agent at the level that the threshold was compared with."""
    success_mean: float | None = None
    """Their mean success, from 0 to 1."""


class CurriculumChanged(Event):
    """The scheduler gives a session another curriculum level. It holds from the next episode on;
    of several that wait for it the last one does."""

    fact: CurriculumFact
    circumstance: CurriculumCircumstance
