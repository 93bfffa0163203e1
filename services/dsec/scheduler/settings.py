"""`scheduler.config.yaml`: how the scheduler is set, field by field.

An unknown key is refused and the known ones are named, so that a typing error never becomes a
default; a key that the design reserves is refused by its name until it does what it says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dsec.scheduler.curriculum import Rules
from dsec.scheduler.placement import RESERVED_RULES, RULES
from dsec_contracts.curriculum import LEVEL_MAX
from dsec_contracts.session import LAG_STEPS_MAX

CONFIG_VARIABLE = "DSEC_SCHEDULER_CONFIG"
"""The environment variable with the path of the file; without it the defaults hold."""

RESERVED_KEYS = (
    "autoscaling",
    "execution_plan",
    "fair_share",
    "resource_overcommit_ratio",
    "reward_variance_window",
    "worker_pool",
)
"""Keys that the design names and that do nothing yet."""


class ConfigError(ValueError):
    """A `scheduler.config.yaml` that cannot be used. Names the file and the key."""


class Section(BaseModel):
    """A part of the file: frozen; unknown and reserved keys are refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, value: Any) -> Any:
        if value is None:  # a section with nothing in it
            return {}
        if not isinstance(value, dict):
            raise ValueError("must be a mapping of keys to values")
        for key in value:
            if key in RESERVED_KEYS:
                raise ValueError(f"{key} is reserved and not implemented yet: leave it out")
            if key not in cls.model_fields:
                known = ", ".join(sorted(cls.model_fields))
                raise ValueError(f"{key} is no known key; known are {known}")
        return value


class SessionLifecycle(Section):
    """How often and how patiently a session is brought back."""

    max_restarts: Annotated[int, Field(ge=0, le=1_000, strict=True)] = 16
    """Placements after deaths that the session's own code caused; one more death ends it."""
    restart_wait_s: Annotated[float, Field(gt=0, le=3_600)] = 60.0
    """How long to wait for the log to pass a fence before trying again later."""


class RateLimitedServices(Section):
    """How sessions are spread whose reward functions ask outside services with a budget."""

    call_every_s: Annotated[float, Field(gt=0, le=3_600)] = 2.0
    """As many of a service's callers run at a time as could each make a call so often within its
    `qps_budget`; the others wait in the queue and hold up nobody. Larger than a step takes, or the
    budget is not used up; much larger, and running sessions wait for each other instead."""


class Curriculum(Section):
    """How the levels of sessions move that are requested with a `curriculum_level`."""

    lag_steps_high: Annotated[int, Field(ge=1, le=LAG_STEPS_MAX, strict=True)] = 16
    """A session whose oldest outstanding reward is more steps behind than this, for `lag_s`, gets
    the level below, and after as long the one below that. Less than its `reward_lag_steps_max`:
    there it stands still and waits."""
    lag_steps_low: Annotated[int, Field(ge=1, le=LAG_STEPS_MAX, strict=True)] = 4
    """Once it is fewer steps behind than this, for `recover_s`, the session goes up a level, until
    it is back where it was."""
    lag_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """How long it has to be too far behind before it goes down."""
    recover_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    """How long it has to be close enough before it goes up."""
    level_min: Annotated[int, Field(ge=0, le=LEVEL_MAX, strict=True)] = 0
    """No session is lowered below this."""
    level_max: Annotated[int, Field(ge=0, le=LEVEL_MAX, strict=True)] = 10
    """No agent is moved up above this."""
    transition_episodes: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 100
    """Over so many finished episodes of an agent at a level its success is taken."""
    return_target: Annotated[float, Field(gt=0)] | None = None
    """The return (sum of an episode's rewards) that is a full success: an episode's success is its
    return divided by this, from 0 to 1. Null: no agent is moved up."""

    @model_validator(mode="after")
    def _in_order(self) -> Curriculum:
        if self.lag_steps_low > self.lag_steps_high:
            raise ValueError(
                f"lag_steps_low ({self.lag_steps_low}) must be at most lag_steps_high "
                f"({self.lag_steps_high}): a level would go down and up at once"
            )
        if self.level_min > self.level_max:
            raise ValueError(
                f"level_min ({self.level_min}) must be at most level_max ({self.level_max})"
            )
        return self


class SchedulerConfig(Section):
    """The whole file."""

    placement: str = "round_robin"
    """The rule by which sessions are given to workers."""
    heartbeat_period_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """How often workers are expected to say that they are alive. They themselves go by
    `DSEC_HEARTBEAT_PERIOD_S`, which has to be changed with this. Of one that beats otherwise the
    scheduler says so, and waits for it at least twice as long as it says that it needs."""
    heartbeat_limit_s: Annotated[float, Field(gt=0, le=600)] = 4.0
    """A worker that is silent for longer is dead."""
    session_absent_limit_s: Annotated[float, Field(gt=0, le=3_600)] = 60.0
    """A worker that has not named a session for longer, though it was placed there and the stream
    shows no end of it, has lost it, and is dead."""
    session_lifecycle: SessionLifecycle = SessionLifecycle()
    rate_limited_services: RateLimitedServices = RateLimitedServices()
    curriculum: Curriculum = Curriculum()
    curriculum_transition_threshold: Annotated[float, Field(gt=0, le=1)] = 0.85
    """An agent whose mean success at a level is at least this goes up; see `curriculum`."""
    worker_deaths_max: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 64
    """Deaths of workers that a session may see without being their cause; then it ends, code
    `infrastructure`."""
    moves_max: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 1_000
    """How often a session may be given back by workers, or be on one that is stopped in good
    order; then it ends, code `infrastructure`."""
    sessions_queued_max: Annotated[int, Field(ge=1, le=10_000_000, strict=True)] = 100_000
    """Sessions that wait in memory. Beyond it requests wait in the log, in their order, and are
    taken from there as places become free; none is refused."""

    def curriculum_rules(self) -> Rules:
        """What decides about levels."""
        told = self.curriculum
        return Rules(
            lag_steps_high=told.lag_steps_high,
            lag_steps_low=told.lag_steps_low,
            lag_s=told.lag_s,
            recover_s=told.recover_s,
            level_min=told.level_min,
            level_max=told.level_max,
            transition_episodes=told.transition_episodes,
            transition_threshold=self.curriculum_transition_threshold,
            return_target=told.return_target,
        )

    @field_validator("placement")
    @classmethod
    def _placement(cls, value: str) -> str:
        if value in RESERVED_RULES:
            raise ValueError(f"{value} is reserved and not implemented yet: use round_robin")
        if value not in RULES:
            raise ValueError(f"{value} is no placement rule; known are {', '.join(sorted(RULES))}")
        return value

    @model_validator(mode="after")
    def _limit_over_period(self) -> SchedulerConfig:
        if self.heartbeat_limit_s < 2 * self.heartbeat_period_s:
            raise ValueError(
                f"heartbeat_limit_s ({self.heartbeat_limit_s:g}) must be at least twice "
                f"heartbeat_period_s ({self.heartbeat_period_s:g}): one late heartbeat is no death"
            )
        return self


def load_config(path: Path | None = None) -> SchedulerConfig:
    """Read the file at `path`, or at `DSEC_SCHEDULER_CONFIG`, or take the defaults.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or holds a key or value that
            is not accepted.
    """
    if path is None:
        named = os.environ.get(CONFIG_VARIABLE)
        if not named:
            return SchedulerConfig()
        path = Path(named)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    try:
        return SchedulerConfig.model_validate(content)
    except ValidationError as error:
        found = []
        for item in error.errors(include_url=False):
            where = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            found.append(f"{where}: {message}" if where else message)
        raise ConfigError(f"{path}: {'; '.join(found)}") from error
