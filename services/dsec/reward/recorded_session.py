"""A session that has ended, as its log has it: the steps that a reward depends on, once more as the
tick that brought them, or as the episodes they make."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dsec.reward.batch import Batch
from dsec.session import log_row
from dsec.session.log_row import LogRow, ended_fact, observation_behind
from dsec.session.whole_episode import EpisodeStep
from dsec_contracts import SessionStepped, keys
from dsec_contracts.columns import VarColumn
from dsec_contracts.step import StepCircumstance, StepColumns

LANE = "rescore"
"""Where a lane's name stands in a reward's subject: no worker listens there."""
COMPLETED = "completed"


class RecordedSession(NamedTuple):
    """A session as its log has it."""

    requested: bool
    ended: bool
    first_observation: bytes
    completed: bool
    """It came to its end: what `max_steps` cut is an episode, too."""
    steps: list[LogRow]
    answers: dict[int, bytes]
    """By step: what services answered for its first reward, or before it was missing, as it is
    recorded."""
    rewarded: frozenset[int]
    """The steps that have a reward, of any revision."""
    reward_keys: frozenset[str]
    """Of all rewards that it has."""

    @classmethod
    def of(cls, rows: Sequence[LogRow]) -> RecordedSession:
        """From all rows of a session."""
        kinds = {row.kind for row in rows}
        started = next((row for row in rows if row.kind == log_row.STARTED), None)
        steps = {row.step: row for row in reversed(rows) if row.kind == log_row.STEPPED}
        answers = {
            row.step: bytes(row.extras)
            for key in (keys.reward_missing, keys.reward)  # the reward that did come counts
            for row in rows
            if row.step is not None and row.extras and row.key == key(row.step)
        }
        return cls(
            log_row.REQUESTED in kinds,
            log_row.ENDED in kinds,
            bytes(started.observation or b"") if started is not None else b"",
            any(row.kind == log_row.ENDED and ended_fact(row).status == COMPLETED for row in rows),
            [row for _, row in sorted(steps.items(), key=lambda entry: entry[0] or 0)],
            answers,
            frozenset(
                r.step for r in rows if r.kind == log_row.REWARD_SCORED and r.step is not None
            ),
            frozenset(row.key for row in rows if row.kind == log_row.REWARD_SCORED),
        )

    def has(self, n: int, revision: int) -> bool:
        """Whether a step, by its index, has a reward of a revision."""
        return keys.reward(self.steps[n].step or 0, revision) in self.reward_keys

    def rewarded_within(self, episodes: Mapping[int, int]) -> int | None:
        """The first step with a reward that is within an episode and does not close it: whoever
        takes the newest reward of each step would add it to that of the whole.

        Args:
            episodes: as `episodes` gives them.
        """
        within = (
            self.steps[n].step for last, first in episodes.items() for n in range(first, last)
        )
        return next((step for step in within if step in self.rewarded), None)

    def episodes(self) -> dict[int, int]:
        """By the index of the step that closes it, the index of each episode's first step."""
        found, first = dict[int, int](), 0
        for n, row in enumerate(self.steps):
            is_cut = self.completed and n == len(self.steps) - 1
            if row.terminated or row.truncated or is_cut:
                found[n], first = first, n + 1
        return found

    def episode(self, first: int, last: int) -> list[EpisodeStep]:
        """The steps of an episode, by their indices."""
        return [
            EpisodeStep(bytes(row.fact), self._prior(n), bytes(row.observation or b""))
            for n, row in enumerate(self.steps[first : last + 1], first)
        ]

    def batch(self, reward_fn_hash: str, revision: int, which: Sequence[int]) -> Batch:
        """Some of the steps as their tick brought them, as far as a reward depends on it."""
        rows = [self.steps[n] for n in which]
        none = VarColumn.pack([b""] * len(rows))
        row = StepColumns.model_construct(
            session_id=b"".join([one.session_id.bytes for one in rows]),
            attempt=bytes(4 * len(rows)),
            step=b"".join([(one.step or 0).to_bytes(4, "little") for one in rows]),
            episode=bytes(4 * len(rows)),
            terminated=bytes(len(rows)),
            truncated=bytes(len(rows)),
            cause=none,
            reset_observation=none,
            extras=none,
            policy=none,
            env_reward=_doubles([one.value or 0.0 for one in rows]),
            chain=b"".join([bytes(one.chain or b"") for one in rows]),
            fact=VarColumn.pack([bytes(one.fact) for one in rows]),
            observation=VarColumn.pack([bytes(one.observation or b"") for one in rows]),
            prior=VarColumn.pack([self._prior(n) for n in which]),
        )
        told = StepCircumstance(lane=LANE, reward_specs={"": reward_fn_hash})
        event = SessionStepped.model_construct(rows=len(rows), row=row, circumstance=told)
        return Batch(event, revision)

    def _prior(self, n: int) -> bytes:
        if n == 0:
            return self.first_observation
        return observation_behind(self.steps[n - 1])


def _doubles(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)
