"""`session.stepped`: one tick of a lane, in columns. The hot event.

The fact of a row is the canonical array of `STEP_FIELDS`; `chain_k = H(chain_{k-1}, fact_k)`. The
observation itself is not in the fact, its hash is: what is recorded of observations is a choice
that changes no chain.
"""

from __future__ import annotations

from operator import not_
from typing import ClassVar, Self

from pydantic import Field, model_validator

from dsec_contracts.columns import VarColumn, check_columns, check_flags
from dsec_contracts.envelope import Event, Part

STEP_FIELDS = (
    "step",  # int, from 0 over the whole session
    "episode",  # int, from 0
    "inputs",  # [[kind, ordinal, hash16], ...] delivered since the output before
    "calls",  # tool calls: [[id, hash16], ...]
    "action",  # what the environment was given
    "proposed",  # what the agent proposed, where a human overrode it; else null
    "env_reward",  # float: the environment's own
    "terminated",  # bool
    "truncated",  # bool
    "info",  # the environment's info
    "state_hash",  # 16 bytes
    "observation_hash",  # 16 bytes, of the canonical observation after the step
    "reset",  # null, or [state_hash, observation_hash, info] of the next episode's reset
)


class StepColumns(Part):
    """Parallel arrays over the rows of one tick. Rows may stand at different steps."""

    session_id: bytes
    """16 bytes a row."""
    attempt: bytes
    """int32 a row, as are `step` and `episode`."""
    step: bytes
    episode: bytes
    env_reward: bytes
    """float64 a row: the environment's own reward, also in the fact."""
    terminated: bytes
    """uint8 a row, 0 or 1."""
    truncated: bytes
    chain: bytes
    """32 bytes a row: chain_k."""
    fact: VarColumn
    """Canonical array of `STEP_FIELDS`."""
    cause: VarColumn
    """UTF-8: the natural key, within the session, of what caused the step."""
    observation: VarColumn
    """Canonical observation after the step, or a reference; empty where none is recorded."""
    prior: VarColumn
    """Canonical observation the agent saw, for reward functions that ask for it; not logged."""
    reset_observation: VarColumn
    """Canonical first observation of the next episode; empty where none began."""
    extras: VarColumn
    """Canonical extras (recorded, not hashed); empty for none."""
    policy: VarColumn
    """UTF-8 `name@version` of the weights that chose the action; empty for none."""


class StepCircumstance(Part):
    """One tick's circumstances, for all its rows."""

    worker: str = ""
    lane: str = ""
    tick: int = 0
    reward_specs: dict[str, str] = Field(default_factory=dict)
    """Session id (hex, no hyphens) to reward spec hash, so that reward needs no query. The entry
    under the empty key holds for every session that has none of its own."""
    deferrable: list[str] = Field(default_factory=list, exclude_if=not_)
    """Session ids (hex, no hyphens) of the rows whose rewards may be deferred: their sessions asked
    for that, with `lag_steps` or `reward_lag_steps_max`."""
    closing: dict[str, int] = Field(default_factory=dict, exclude_if=not_)
    """Session ids (hex, no hyphens) of the rows that close an episode which is rewarded as a whole,
    each with the first step of that episode. The other steps of such a session get no reward."""


class SessionStepped(Event):
    """The sessions of a lane took a step each."""

    columns: ClassVar[bool] = True

    rows: int
    row: StepColumns
    circumstance: StepCircumstance = StepCircumstance()

    @model_validator(mode="after")
    def _check(self) -> Self:
        row = self.row
        check_columns(
            self.rows,
            {
                "session_id": (row.session_id, 16),
                "attempt": (row.attempt, 4),
                "step": (row.step, 4),
                "episode": (row.episode, 4),
                "env_reward": (row.env_reward, 8),
                "terminated": (row.terminated, 1),
                "truncated": (row.truncated, 1),
                "chain": (row.chain, 32),
            },
            {
                name: getattr(row, name)
                for name in (
                    "fact",
                    "cause",
                    "observation",
                    "prior",
                    "reset_observation",
                    "extras",
                    "policy",
                )
            },
        )
        check_flags(terminated=row.terminated, truncated=row.truncated)
        return self
