"""Recall: the returns that a scheduler which starts would have, had it led all along.

The log is read backwards, from the newest episodes of the sessions that run, have just ended, and
ended before, in this order, until no window can change any more or `RECALLED_STEPS_MAX` steps were
read. A session's episodes count as far as `Curricula.read` would have taken them: none behind one
whose rewards are still to come, which are those of its last `LAG_STEPS_MAX` steps at most. From
there on it is read like any other.
"""

from __future__ import annotations

import logging
from collections import deque
from math import inf
from typing import Protocol
from uuid import UUID

from dsec.scheduler.curriculum import (
    SESSIONS_AT_ONCE_MAX,
    STEPS_AT_ONCE_MAX,
    Curricula,
    Learner,
    returns_by,
)
from dsec.scheduler.episodes import Ended
from dsec.scheduler.portions import Portion, Unread, counted
from dsec.scheduler.returns import Episode, Returns
from dsec_contracts.session import LAG_STEPS_MAX

log = logging.getLogger(__name__)

RECALLED_STEPS_MAX = 500_000
"""Steps that are read for it: some seconds of the database."""
RECALLED_SESSIONS_MAX = 10_000
"""Ended sessions with a curriculum that are looked at, the newest ends first."""


class Log(Protocol):
    """What is asked of the log. Positions come as integers, from the viewpoint of an epoch."""

    async def ended_learners(self, epoch: int, sessions_max: int) -> list[Ended]:
        """The sessions with a curriculum that ended last, the newest ends first."""

    async def steps_of(self, session_ids: list[UUID]) -> dict[UUID, int]:
        """How many steps of each are logged."""

    async def changes_of(self, session_ids: list[UUID]) -> dict[UUID, dict[int, int]]:
        """The changes of each one's level, by their numbers."""

    async def episodes(self, unread: list[Unread], epoch: int) -> list[Portion]:
        """What is logged of these steps, by session and episode."""


async def recall(history: Log, curricula: Curricula, epoch: int, per_episode: set[str]) -> None:
    """Fill the returns, and have each session read from where they end.

    Args:
        per_episode: reward specs that score whole episodes.
    """
    known = curricula.learners | curricula.over
    ended = await history.ended_learners(epoch, RECALLED_SESSIONS_MAX)
    steps = await history.steps_of(list(known))
    sessions = [Recalled(one, known[one], steps[one], (inf, 0)) for one in known]
    sessions += [_of(one, per_episode) for one in ended if one.session_id not in known]
    returns = returns_by(curricula.rules)
    left = RECALLED_STEPS_MAX
    for first in range(0, len(sessions), SESSIONS_AT_ONCE_MAX):
        some = sessions[first : first + SESSIONS_AT_ONCE_MAX]
        changes = await history.changes_of([one.session_id for one in some])
        for one in some:
            one.knows(changes.get(one.session_id, {}), returns)
        left = await _read(history, some, epoch, left)
        for one in some:
            one.tell(returns)
    if left <= 0:
        log.warning("of the episodes so far the last %d steps were read", RECALLED_STEPS_MAX)
    curricula.returns = returns
    for one in sessions:
        one.go_on(curricula)
    curricula.recalled = True


async def _read(history: Log, some: list[Recalled], epoch: int, left: int) -> int:
    """Read what these ask for. Returns how many more steps may be read."""
    while left > 0 and (asking := [one for one in some if not one.done]):
        asked = [one.asks() for one in asking]
        left -= sum(unread.last_step + 1 - unread.first_step for unread in asked)
        found: dict[UUID, list[Portion]] = {}
        for portion in await history.episodes(asked, epoch):
            found.setdefault(portion.session_id, []).append(portion)
        for one, unread in zip(asking, asked, strict=True):
            one.take(unread, found.get(one.session_id, []))
    return left


def _of(ended: Ended, per_episode: set[str]) -> Recalled:
    learner = Learner(
        ended.agent_spec,
        ended.level,
        ended.level,
        steps=ended.steps,
        read_level=ended.level,
        per_episode=ended.reward_spec in per_episode,
    )
    return Recalled(ended.session_id, learner, ended.steps, ended.at)


class Recalled:
    """One session's episodes, read from the newest to the oldest."""

    def __init__(
        self, session_id: UUID, learner: Learner, steps: int, ended: tuple[float, int]
    ) -> None:
        """Nothing is read yet.

        Args:
            learner: as if none of its steps had been read.
            ended: where it ended.
        """
        self.session_id = session_id
        self.done = steps == 0
        self._learner = learner
        self._level = learner.read_level
        """Of its first episode."""
        self._steps = self._upto = steps
        self._ended = ended
        self._enough = 0
        self._changes: set[int] = set()
        """Those that an episode which is read next may turn out to be the first one with."""
        self._pieces: deque[Portion] = deque()
        """Of the episode whose beginning was not read yet."""
        self._newer: list[Episode] = []
        """Those that the next change which is found tells the level of."""
        self._counted: list[tuple[int, Episode]] = []
        self._changed = 0
        """How many of these began with a change, or after one."""
        self._next_step = steps
        """From here on it is to be read like any other, at a level that is found out, too."""
        self._next_level: int | None = None
        self._owed = False
        """A reward behind that is still to come."""

    def knows(self, changes: dict[int, int], returns: Returns) -> None:
        """What the log has of its level. Of a session that is too old to count nothing is read.

        Args:
            returns: what is recalled of newer ones.
        """
        learner = self._learner
        learner.level_of |= changes
        self._changes = set(learner.level_of)
        self._enough = returns.kept_max
        levels = {self._level, *learner.level_of.values()}
        if all(returns.only_newer((learner.agent_spec, one), self._ended) for one in levels):
            self.done = True

    def asks(self) -> Unread:
        """The steps to be read next."""
        first = max(0, self._upto - STEPS_AT_ONCE_MAX)
        return Unread(self.session_id, first, self._upto - 1)

    def take(self, asked: Unread, portions: list[Portion]) -> None:
        """What the log has of these steps, by episode."""
        if sum(one.steps for one in portions) != asked.last_step + 1 - asked.first_step:
            self._from_the_beginning()  # the log lacks a step: behind it nothing counts
            return
        for portion in reversed(portions):
            if self._pieces and self._pieces[0].episode != portion.episode:
                self._close()
            self._pieces.appendleft(portion)
        self._upto = asked.first_step
        if self._upto == 0:
            self._close()
        if self.done:
            return
        if self._upto == 0 or not self._changes:
            self._at(self._level)
        enough = len(self._counted) - self._changed >= self._enough
        self.done = self._upto == 0 or (enough and self._steps - self._upto >= LAG_STEPS_MAX)

    def _close(self) -> None:
        """All of an episode was read."""
        pieces = list(self._pieces)
        self._pieces.clear()
        first, last = pieces[0], pieces[-1]
        if last.change is not None:
            level = self._learner.level_of.get(last.change)
            if level is None:
                self._from_the_beginning()  # the log is ahead of the stream
                return
            self._at(level)
            self._changes = {n for n in self._changes if n < last.change}
            self._changed = len(self._counted)
        complete = all(one.complete(self._learner.per_episode) for one in pieces)
        if last.at is None or not complete:
            self._newer.clear()
            self._counted.clear()
            self._changed = 0
            self._next_step, self._next_level = first.last_step + 1 - first.steps, None
            self._owed = self._owed or not complete
            return
        value: float | None = 0.0
        for one in pieces:
            value = one.added_to(value)
        if (episode := counted(last, last.at, value)) is not None:
            self._newer.append(episode)

    def _at(self, level: int) -> None:
        """The level of what was read since a change was found."""
        self._counted += [(level, episode) for episode in self._newer]
        self._newer.clear()
        if self._next_level is None:
            self._next_level = level

    def _from_the_beginning(self) -> None:
        self._newer.clear()
        self._counted.clear()
        self._next_step, self._next_level, self._owed = 0, self._level, True
        self.done = True

    def tell(self, returns: Returns) -> None:
        """Have the episodes count."""
        if not self.done:  # so far back that the newest of the changes before is the one
            of = self._learner.level_of
            self._at(of[max(self._changes)] if self._changes else self._level)
        for level, episode in self._counted:
            returns.add((self._learner.agent_spec, level), episode)

    def go_on(self, curricula: Curricula) -> None:
        """Have the rest read, as it comes."""
        learner = self._learner
        learner.read_steps, learner.read_return = self._next_step, 0.0
        learner.read_level = self._level if self._next_level is None else self._next_level
        running = self.session_id in curricula.learners or self.session_id in curricula.over
        if self._owed and not running:
            curricula.end(self.session_id, learner)
