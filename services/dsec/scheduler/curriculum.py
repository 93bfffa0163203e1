"""When a session's curriculum level changes: State, Fold, Decisions, in that order. Pure.

Two things move it. A session whose rewards lag badly gets an easier level for the time, and one
level at a time what it had once they no longer do. And an agent that has mastered a level, by the
returns of its last episodes there, goes up.

The levels are a fold of the log and the stream, so a scheduler that takes over has them. The
returns of episodes it reads from the log (`recall.py`) before it moves an agent up. How long a
session's rewards have lagged it finds out anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from uuid import UUID

from dsec.scheduler.intents import ChangeLevel
from dsec.scheduler.portions import Portion, Unread, counted
from dsec.scheduler.returns import At, Returns
from dsec_contracts import keys
from dsec_contracts.curriculum import ChangeReason, CurriculumChanged

STEPS_AT_ONCE_MAX = 2_000
"""Steps of one session whose rewards are read from the log at once."""
SESSIONS_AT_ONCE_MAX = 64
OVER_SESSIONS_MAX = 10_000
"""Ended sessions whose last episodes were not read yet; whose turn is next goes first."""
OVER_READS_OFTEN = 30
"""So often the last episodes of an ended session are looked for whenever its turn comes; after that
`OVER_SELDOM_AT_ONCE_MAX` of all of these at a time, so that no reward comes too late to count."""
OVER_SELDOM_AT_ONCE_MAX = 1


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that decisions keep to; see `scheduler.config.yaml`."""

    lag_steps_high: int = 16
    lag_steps_low: int = 4
    lag_s: float = 10.0
    recover_s: float = 30.0
    level_min: int = 0
    level_max: int = 10
    transition_episodes: int = 100
    transition_threshold: float = 0.85
    return_target: float | None = None


# -- State -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Learner:
    """A session that has a curriculum."""

    agent_spec: str
    level: int
    had: int
    """The level that it has where its rewards do not lag."""
    since: int = 0
    """Where in the stream it was given the level that it has."""
    changes: int = 0
    """The number of its last change."""
    issued: int = 0
    """The number of the last change that was published; a higher one than `changes` is in flight.
    """
    lag_steps: int = 0
    steps: int = 0
    heard_at_s: float = 0.0
    high_since_s: float | None = None
    low_since_s: float | None = None
    level_of: dict[int, int] = field(default_factory=dict)
    """The levels of changes that no episode that was read has begun with."""
    read_steps: int = 0
    """Of so many steps the rewards were read."""
    read_level: int = 0
    """The level of the episode that is being read."""
    read_return: float | None = 0.0
    """The sum of its rewards so far; None: one is missing."""
    per_episode: bool = False
    """It has one reward an episode, at its last step."""
    reads: int = 0
    """How often it was looked for the rest, since the session is over."""

    def settle(self) -> None:
        """What was seen so far says nothing about what follows."""
        self.high_since_s = self.low_since_s = None


def returns_by(rules: Rules) -> Returns:
    """No returns yet."""
    return Returns(rules.transition_episodes, rules.transition_threshold, rules.return_target)


class Curricula:
    """All sessions that have one."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.learners: dict[UUID, Learner] = {}
        self.over: OrderedDict[UUID, Learner] = OrderedDict()
        """Ended ones, while their last episodes are not read."""
        self.returns = returns_by(rules)
        self.recalled = False
        """The returns hold what the log had when this scheduler began: agents may go up."""

    # -- Fold --------------------------------------------------------------------------------------

    def add(
        self,
        session_id: UUID,
        agent_spec: str,
        level: int | None,
        since: int,
        *,
        per_episode: bool = False,
    ) -> None:
        """A session became known: `since` is where in the stream it was requested."""
        if level is not None:
            self.learners[session_id] = Learner(
                agent_spec, level, level, since, read_level=level, per_episode=per_episode
            )

    def moved(self, session_id: UUID) -> None:
        """A session was placed on a worker."""
        if (learner := self.learners.get(session_id)) is not None:
            learner.settle()

    def changed(self, event: CurriculumChanged, sequence: int) -> None:
        """A level was changed, at this position. Of changes with one number the first counts."""
        fact = event.fact
        learner = self.learners.get(fact.session_id)
        if learner is None or fact.n <= learner.changes:
            return
        learner.changes, learner.level, learner.since = fact.n, fact.level, sequence
        learner.level_of[fact.n] = fact.level
        if event.circumstance.why == "threshold":
            learner.had = fact.level
        learner.settle()

    def ended(self, session_id: UUID, steps: int) -> None:
        """A session is over. Its last episodes still count."""
        learner = self.learners.pop(session_id, None)
        if learner is not None and self.rules.return_target is not None:
            learner.steps = steps
            self.end(session_id, learner)

    def end(self, session_id: UUID, learner: Learner) -> None:
        """Have the last episodes of an ended session read."""
        self.over[session_id] = learner
        if len(self.over) > OVER_SESSIONS_MAX:
            self.over.popitem(last=False)

    def forget(self, session_id: UUID) -> None:
        """It is no session after all."""
        self.learners.pop(session_id, None)

    def hear(self, session_id: UUID, lag_steps: int, steps: int, at_s: float) -> None:
        """A worker says how far a session's rewards are behind."""
        learner = self.learners.get(session_id)
        if learner is None:
            return
        learner.lag_steps, learner.steps, learner.heard_at_s = lag_steps, steps, at_s
        if lag_steps <= self.rules.lag_steps_high:
            learner.high_since_s = None
        elif learner.high_since_s is None:
            learner.high_since_s = at_s
        if lag_steps >= self.rules.lag_steps_low:
            learner.low_since_s = None
        elif learner.low_since_s is None:
            learner.low_since_s = at_s

    # -- episodes, from the log ------------------------------------------------------------------

    def unread(self) -> list[Unread]:
        """What is to be read next. Each of them comes to the end of the line."""
        found = []
        seldom = 0
        for line in (self.over, self.learners):
            for session_id in list(line)[:SESSIONS_AT_ONCE_MAX]:
                learner = line.pop(session_id)
                first = learner.read_steps
                if line is self.over and first >= learner.steps:
                    continue
                line[session_id] = learner
                learner.reads += line is self.over
                if learner.reads > OVER_READS_OFTEN:
                    seldom += 1
                    if seldom > OVER_SELDOM_AT_ONCE_MAX:
                        continue
                if first < learner.steps:
                    last = min(first + STEPS_AT_ONCE_MAX, learner.steps) - 1
                    found.append(Unread(session_id, first, last))
        return found

    def read(self, portions: list[Portion]) -> None:
        """Take what the log has, in the order of each session's steps."""
        for portion in portions:
            learner = self.over.get(portion.session_id) or self.learners.get(portion.session_id)
            if learner is None or portion.last_step + 1 != learner.read_steps + portion.steps:
                continue  # a step is not there yet, or one before was not taken
            if not portion.complete(learner.per_episode):
                continue  # a reward is still to come
            if portion.change is not None and portion.change not in learner.level_of:
                continue  # the log is ahead of the stream
            learner.read_steps = portion.last_step + 1
            learner.read_return = portion.added_to(learner.read_return)
            if portion.at is not None:
                self._finish(learner, portion, portion.at)

    def _finish(self, learner: Learner, portion: Portion, at: At) -> None:
        """An episode was read to its end."""
        value, learner.read_return = learner.read_return, 0.0
        if (episode := counted(portion, at, value)) is not None:
            self.returns.add((learner.agent_spec, learner.read_level), episode)
        if portion.change is not None:
            learner.read_level = learner.level_of[portion.change]
            for n in [n for n in learner.level_of if n <= portion.change]:
                del learner.level_of[n]

    # -- in flight -------------------------------------------------------------------------------

    def issued(self, intent: ChangeLevel) -> None:
        """A change is on its way."""
        if (learner := self.learners.get(intent.session_id)) is not None:
            learner.issued = intent.n

    def withdrawn(self, intent: ChangeLevel) -> None:
        """It came to nothing."""
        if (learner := self.learners.get(intent.session_id)) is not None:
            learner.issued = learner.changes


# -- Decisions -------------------------------------------------------------------------------------


def decide_levels(
    curricula: Curricula, lane_of: Callable[[UUID], str | None]
) -> Iterator[ChangeLevel]:
    """The changes that are due.

    Args:
        lane_of: where a session is; None: on no worker.
    """
    for session_id, learner in curricula.learners.items():
        lane = lane_of(session_id)
        if lane is None or learner.issued > learner.changes:
            continue
        change = _for_lag(session_id, learner, lane, curricula.rules)
        if change is None and learner.level == learner.had and learner.high_since_s is None:
            change = _promotion(session_id, learner, lane, curricula)
        if change is not None:
            yield change


def _for_lag(session_id: UUID, learner: Learner, lane: str, rules: Rules) -> ChangeLevel | None:
    """Down while the rewards lag, and up again, as far as it was, once they do not."""
    why: ChangeReason
    if learner.high_since_s is not None:
        for_s = learner.heard_at_s - learner.high_since_s
        if for_s < rules.lag_s or learner.level <= rules.level_min:
            return None
        level, why = learner.level - 1, "rewards_lag"
        cause = keys.step(max(0, learner.steps - learner.lag_steps))
    elif learner.low_since_s is not None and learner.level < learner.had:
        for_s = learner.heard_at_s - learner.low_since_s
        if for_s < rules.recover_s:
            return None
        level, why = learner.level + 1, "rewards_recovered"
        cause = keys.curriculum(learner.changes)
    else:
        return None
    return ChangeLevel(
        session_id,
        learner.changes + 1,
        level,
        learner.level,
        why,
        lane,
        keys.of(session_id, cause),
        lag_steps=learner.lag_steps,
        for_s=for_s,
    )


def _promotion(
    session_id: UUID, learner: Learner, lane: str, curricula: Curricula
) -> ChangeLevel | None:
    """Up, where the agent has mastered the level: with an episode since the session has it, or with
    the newest of all."""
    rules = curricula.rules
    if learner.level >= rules.level_max or not curricula.recalled:
        return None
    mastery = curricula.returns.mastered((learner.agent_spec, learner.level), learner.since)
    if mastery is None:
        return None
    return ChangeLevel(
        session_id,
        learner.changes + 1,
        learner.level + 1,
        learner.level,
        "threshold",
        lane,
        mastery.cause,
        episodes=rules.transition_episodes,
        success_mean=mastery.mean,
    )
