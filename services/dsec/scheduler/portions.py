"""Portions: what the log has of the episodes of sessions with a curriculum, as far as it is asked.

An episode may be longer than what is read at once, and its rewards may come late: it is read in
portions, in the order of its steps, and each portion only once all its rewards are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from uuid import UUID

from dsec.scheduler.returns import At, Episode


@dataclass(frozen=True, slots=True)
class Unread:
    """Steps of a session whose rewards are to be read from the log."""

    session_id: UUID
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Portion:
    """What the log has of one episode, from `Unread.first_step` on."""

    session_id: UUID
    episode: int
    steps: int
    last_step: int
    rewards: Sequence[float]
    """In the order of the steps that have one."""
    missing: int = 0
    """Steps that will have no reward."""
    at: At | None = None
    """Where in the log its last step is. None: that is not among these."""
    change: int | None = None
    """The change of the level that the episode after it begins with."""

    def complete(self, per_episode: bool) -> bool:
        """Whether no reward is still to come."""
        due = self.at is not None if per_episode else self.steps
        return len(self.rewards) + self.missing >= due

    def added_to(self, total: float | None) -> float | None:
        """The sum of the episode's rewards, with those before; None: one is missing. Added one by
        one: in how many portions an episode is read must make no difference."""
        if total is None or self.missing:
            return None
        for reward in self.rewards:
            total += reward
        return total


def counted(last: Portion, at: At, value: float | None) -> Episode | None:
    """An episode that counts; None: it lacks a reward, or has one that is no number, and says
    nothing of the agent.

    Args:
        last: its last portion.
        value: the sum of its rewards.
    """
    if value is None or not isfinite(value):
        return None
    return Episode(at, value, last.session_id, last.last_step)
