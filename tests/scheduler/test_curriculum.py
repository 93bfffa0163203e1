"""When curriculum levels change: in virtual time, and once among real servers."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.scheduler.conftest import CONFIG, World
from tests.scheduler.test_decider import AGENT, Model, request, session_id

from dsec.platform.clock import utc_now
from dsec.scheduler.curriculum import (
    OVER_READS_OFTEN,
    STEPS_AT_ONCE_MAX,
    Curricula,
    Rules,
    decide_levels,
)
from dsec.scheduler.episodes import portion
from dsec.scheduler.fold import hear
from dsec.scheduler.in_flight import issued, withdrawn
from dsec.scheduler.intents import ChangeLevel
from dsec.scheduler.portions import Portion
from dsec.scheduler.state import SchedulerState
from dsec_contracts import CurriculumChanged, RewardScored, SessionStepped, WorkerHeartbeat, keys
from dsec_contracts.canonical import encode
from dsec_contracts.columns import VarColumn
from dsec_contracts.curriculum import CurriculumCircumstance, CurriculumFact
from dsec_contracts.reward import RewardColumns
from dsec_contracts.step import STEP_FIELDS, StepColumns
from dsec_contracts.worker import HeartbeatCircumstance, HeartbeatFact

RULES = Rules(
    lag_steps_high=10,
    lag_steps_low=3,
    lag_s=5.0,
    recover_s=8.0,
    level_min=1,
    level_max=6,
    transition_episodes=4,
    return_target=10.0,
)
ONE = session_id(1)


def event_of(change: ChangeLevel) -> CurriculumChanged:
    return CurriculumChanged(
        fact=CurriculumFact(
            session_id=change.session_id,
            n=change.n,
            level=change.level,
            previous_level=change.previous_level,
        ),
        circumstance=CurriculumCircumstance(why=change.why),
    )


def recalled(rules: Rules = RULES) -> Curricula:
    """Those of a scheduler that has read all there was."""
    curricula = Curricula(rules)
    curricula.recalled = True
    return curricula


def returns_of(curricula: Curricula, place: tuple[str, int] = (AGENT, 3)) -> list[float]:
    """Of the episodes of an agent at a level."""
    return [episode.value for episode in curricula.returns.windows[place].episodes]


@dataclass
class Levels:
    """Sessions with a curriculum, of one agent, and a clock."""

    curricula: Curricula = field(default_factory=recalled)
    sequence: int = 0
    at_s: float = 0.0
    steps: int = 40
    waiting: set[UUID] = field(default_factory=set)
    seen: list[ChangeLevel] = field(default_factory=list)

    def add(self, n: int = 1, level: int = 3) -> None:
        self.curricula.add(session_id(n), AGENT, level, self.sequence)

    def lane_of(self, one: UUID) -> str | None:
        return None if one in self.waiting else "w1-0"

    def decide(self) -> list[ChangeLevel]:
        return list(decide_levels(self.curricula, self.lane_of))

    def happens(self) -> list[ChangeLevel]:
        """What is due is issued, and the stream shows it."""
        found = self.decide()
        for change in found:
            self.curricula.issued(change)
            self.sequence += 1
            self.curricula.changed(event_of(change), self.sequence)
        self.seen += found
        return found

    def lag(self, steps: int, for_s: float, n: int = 1) -> list[int]:
        """A session's rewards are so many steps behind, for a time; the levels that it gets."""
        got = []
        for _ in range(int(for_s)):
            self.curricula.hear(session_id(n), steps, self.steps, self.at_s)
            got += [change.level for change in self.happens()]
            self.at_s += 1.0
        return got

    def play(self, *returns: float | None, n: int = 1, change: int | None = None) -> None:
        """Episodes of two steps end, and the log has them. None: a reward is missing."""
        for value in returns:
            learner = self.curricula.learners[session_id(n)]
            last = learner.read_steps + 1
            learner.steps = max(learner.steps, last + 1)
            self.sequence += 1
            rewards = [value, 0.0] if value is not None else [0.0]
            at = self.sequence, 0
            self.curricula.read(
                [Portion(session_id(n), 0, 2, last, rewards, 2 - len(rewards), at, change)]
            )


# -- rewards that lag ------------------------------------------------------------------------------


def test_a_session_whose_rewards_lag_goes_down_and_as_smoothly_up_again() -> None:
    levels = Levels()
    levels.add(level=3)
    assert levels.lag(11, 5) == []
    assert levels.lag(11, 1) == [2]  # after lag_s
    assert levels.lag(11, 5) == []
    assert levels.lag(11, 2) == [1]  # and after as long again
    assert levels.lag(11, 30) == []  # level_min
    assert levels.lag(2, 8) == []
    assert levels.lag(2, 1) == [2]  # after recover_s, one level
    assert levels.lag(2, 8) == []
    assert levels.lag(2, 2) == [3]
    assert levels.lag(2, 60) == []  # where it was
    assert [change.why for change in levels.seen] == ["rewards_lag"] * 2 + ["rewards_recovered"] * 2
    assert [change.n for change in levels.seen] == [1, 2, 3, 4]
    assert levels.seen[0].cause == keys.of(ONE, keys.step(29))
    assert levels.seen[2].cause == keys.of(ONE, keys.curriculum(2))


def test_a_lag_that_does_not_last_changes_nothing() -> None:
    levels = Levels()
    levels.add()
    for _ in range(5):
        assert levels.lag(11, 5) == []
        assert levels.lag(10, 1) == []  # not above lag_steps_high
    levels.lag(11, 7)
    for _ in range(5):
        assert levels.lag(2, 8) == []
        assert levels.lag(3, 1) == []  # not below lag_steps_low


def test_of_a_worker_that_is_silent_nothing_is_concluded() -> None:
    levels = Levels()
    levels.add()
    levels.lag(11, 4)
    levels.at_s += 100
    assert levels.happens() == []


def test_a_session_that_has_moved_begins_anew() -> None:
    levels = Levels()
    levels.add()
    levels.lag(11, 5)
    levels.curricula.moved(ONE)
    assert levels.lag(11, 5) == []


def test_a_change_in_flight_is_not_issued_twice() -> None:
    levels = Levels()
    levels.add()
    levels.lag(11, 5)
    levels.curricula.hear(ONE, 11, 40, levels.at_s)
    [change] = levels.decide()
    levels.curricula.issued(change)
    for _ in range(20):
        levels.at_s += 1
        levels.curricula.hear(ONE, 11, 40, levels.at_s)
        assert levels.decide() == []
    levels.curricula.withdrawn(change)
    [again] = levels.decide()
    assert again.n == change.n
    levels.curricula.changed(event_of(change), 1)
    levels.curricula.changed(event_of(change), 2)
    assert levels.curricula.learners[ONE].since == 1
    assert levels.curricula.learners[ONE].level == 2
    assert levels.decide() == []


def test_a_session_without_a_worker_is_left_alone() -> None:
    levels = Levels(waiting={ONE})
    levels.add()
    assert levels.lag(11, 20) == []


def test_a_session_without_a_curriculum_takes_no_part() -> None:
    curricula = Curricula(RULES)
    curricula.add(ONE, AGENT, None, 0)
    curricula.hear(ONE, 99, 100, 0.0)
    curricula.hear(ONE, 99, 100, 99.0)
    assert list(decide_levels(curricula, lambda _: "w1-0")) == []


# -- the threshold ---------------------------------------------------------------------------------


def test_an_agent_that_has_mastered_a_level_goes_up() -> None:
    levels = Levels()
    levels.add(1, level=3)
    levels.add(2, level=3)
    levels.add(3, level=5)
    levels.play(9.0, 8.0, 100.0)  # at most a full success each
    assert levels.happens() == []  # too few
    levels.play(6.9, n=2)
    assert levels.happens() == []  # a mean of 0.8475
    levels.play(7.1, 12.0, n=2)
    found = levels.happens()  # of the last four: 1.0, 0.69, 0.71, 1.0
    levels.play(10.0, n=2)
    found += levels.happens()
    assert [(one.session_id, one.level) for one in found] == [
        (session_id(1), 4),
        (session_id(2), 4),
    ]
    assert {one.why for one in found} == {"threshold"}
    assert found[0].success_mean == pytest.approx(0.85)
    assert found[0].cause == keys.of(session_id(2), keys.step(5))
    assert levels.happens() == []  # at the next level there is nothing yet


def test_no_agent_goes_above_the_last_level_and_without_a_target_none_goes_up() -> None:
    levels = Levels()
    levels.add(level=6)
    levels.play(*[10.0] * 9)
    assert levels.happens() == []
    aimless = Levels(recalled(Rules(transition_episodes=2)))
    aimless.add(level=3)
    aimless.play(*[10.0] * 9)
    assert aimless.happens() == []


def test_an_episode_that_lacks_a_reward_says_nothing() -> None:
    levels = Levels()
    levels.add()
    levels.play(10.0, None, 10.0, float("nan"), 10.0)
    assert levels.happens() == []
    levels.play(10.0)
    assert [one.level for one in levels.happens()] == [4]


def test_an_episode_counts_at_the_level_that_it_had() -> None:
    levels = Levels()
    levels.add(level=3)
    levels.lag(11, 6)  # it is at 2 from its next episode on
    levels.play(10.0, change=1)
    levels.play(10.0, 10.0)
    windows = levels.curricula.returns.windows
    assert {at: len(window.episodes) for (_, at), window in windows.items()} == {3: 1, 2: 2}


def test_a_session_that_was_lowered_is_not_taken_for_one_that_learns_there() -> None:
    levels = Levels()
    levels.add(1, level=2)
    levels.add(2, level=3)
    levels.lag(11, 6, n=2)
    levels.play(*[10.0] * 4, n=1)
    assert [one.session_id for one in levels.happens()] == [session_id(1)]


def test_what_it_was_moved_up_to_is_what_it_comes_back_to() -> None:
    levels = Levels()
    levels.add(level=3)
    levels.play(*[10.0] * 4)
    levels.happens()
    assert levels.lag(11, 7) == [3]
    assert levels.lag(0, 60) == [4]


# -- reading the log -------------------------------------------------------------------------------


def test_steps_whose_rewards_are_to_come_are_read_again() -> None:
    curricula = Curricula(RULES)
    curricula.add(ONE, AGENT, 3, 0)
    curricula.hear(ONE, 0, 5, 0.0)
    [asked] = curricula.unread()
    assert (asked.first_step, asked.last_step) == (0, 4)
    curricula.read([Portion(ONE, 0, 3, 2, [1.0, 1.0], at=(7, 0))])
    assert curricula.unread() == [asked]
    curricula.read([Portion(ONE, 0, 3, 2, [1.0] * 3, at=(7, 0)), Portion(ONE, 1, 1, 4, [1.0])])
    [asked] = curricula.unread()
    assert asked.first_step == 3  # step 3 was not there
    assert returns_of(curricula) == [3.0]


def test_a_long_episode_is_read_in_parts() -> None:
    curricula = Curricula(RULES)
    curricula.add(ONE, AGENT, 3, 0)
    curricula.hear(ONE, 0, 2 * STEPS_AT_ONCE_MAX, 0.0)
    for n in range(2):
        [asked] = curricula.unread()
        assert (asked.first_step, asked.last_step) == (
            n * STEPS_AT_ONCE_MAX,
            (n + 1) * STEPS_AT_ONCE_MAX - 1,
        )
        steps = STEPS_AT_ONCE_MAX
        rewards = [0.0] * (steps - 1) + [2.5]
        at = (9, 0) if n else None
        curricula.read([Portion(ONE, 0, steps, asked.last_step, rewards, at=at)])
    assert returns_of(curricula) == [5.0]
    assert curricula.unread() == []


def test_the_last_episodes_of_an_ended_session_count() -> None:
    curricula = Curricula(RULES)
    curricula.add(ONE, AGENT, 3, 0)
    curricula.ended(ONE, 4)
    assert [(one.first_step, one.last_step) for one in curricula.unread()] == [(0, 3)]
    curricula.read([Portion(ONE, 0, 4, 3, [1.0] * 4, at=(5, 0))])
    assert returns_of(curricula) == [4.0]
    assert curricula.unread() == []
    assert not curricula.over
    curricula.add(session_id(2), AGENT, 3, 0)
    curricula.ended(session_id(2), 4)
    curricula.add(session_id(3), AGENT, 3, 0)
    curricula.ended(session_id(3), 4)
    looks = [len(curricula.unread()) for _ in range(OVER_READS_OFTEN + 4)]
    assert looks == [2] * OVER_READS_OFTEN + [1] * 4, "then one after the other, for good"
    late = Portion(session_id(2), 0, 4, 3, [1.0] * 4, at=(6, 0))
    curricula.read([late])
    assert returns_of(curricula) == [4.0, 4.0]


def test_a_row_of_the_query_tells_which_change_followed() -> None:
    fact: list[Any] = [None] * len(STEP_FIELDS)
    fact[STEP_FIELDS.index("inputs")] = [["reward", 6, b""], ["curriculum", 2, b""]]
    found = portion((ONE, 4, 3, 6, [0.5] * 3, 0, 1, 70, 2, encode(fact)), (70, 2))
    assert found == Portion(ONE, 4, 3, 6, [0.5] * 3, 0, (70, 2), 2)
    row = (ONE, 5, 1, 7, [], 1, None, None, None, None)
    assert portion(row, None) == Portion(ONE, 5, 1, 7, [], 1)


# -- whatever happens ------------------------------------------------------------------------------

happenings = st.lists(
    st.one_of(
        st.tuples(st.just("lag"), st.integers(0, 20), st.integers(1, 12)),
        st.tuples(st.just("play"), st.floats(0, 12), st.integers(1, 4)),
        st.tuples(st.just("moved"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(happened=happenings, first=st.integers(1, 6))
def test_levels_move_by_one_within_their_bounds_and_come_back(happened: Any, first: int) -> None:
    levels = Levels()
    levels.add(level=first)
    for what, value, count in happened:
        if what == "lag":
            levels.lag(value, count)
        elif what == "play":
            levels.play(*[value] * count)
            levels.happens()
        else:
            levels.curricula.moved(ONE)
    path = [first, *(one.level for one in levels.seen)]
    assert [one.previous_level for one in levels.seen] == path[:-1]
    assert [one.n for one in levels.seen] == list(range(1, len(path)))
    assert all(abs(a - b) == 1 for a, b in pairwise(path))
    assert all(RULES.level_min <= level <= RULES.level_max for level in path)
    had = first + sum(one.why == "threshold" for one in levels.seen)
    assert all(level <= had for level in path)
    levels.lag(0, 200)
    assert levels.curricula.learners[ONE].level == levels.curricula.learners[ONE].had >= had


@settings(max_examples=60, deadline=None)
@given(happened=happenings, data=st.data())
def test_a_scheduler_that_takes_over_knows_the_levels(happened: Any, data: Any) -> None:
    """The fold of the same events, each as often as it likes, is the same level."""
    levels = Levels()
    levels.add()
    for what, value, count in happened:
        if what == "lag":
            levels.lag(value, count)
        elif what == "play":
            levels.play(*[value] * count)
            levels.happens()
    other = Levels()
    other.add()
    for change in levels.seen:
        for _ in range(data.draw(st.integers(1, 3))):
            other.curricula.changed(event_of(change), change.n)
    one, two = (each.curricula.learners[ONE] for each in (levels, other))
    assert (one.level, one.had, one.changes) == (two.level, two.had, two.changes)


# -- in the scheduler's state ----------------------------------------------------------------------


def beat(model: Model, lag_steps: int, *, attempt: int = 1, steps: int = 40) -> None:
    fact = HeartbeatFact(worker="w1", node="n", state="ready", lanes=["w1-0"], capacity_sessions=10)
    told = HeartbeatCircumstance(
        sessions=[ONE],
        attempts=[attempt],
        steps=[steps],
        waiting_on=["reward"],
        reward_lag_steps=[lag_steps],
        sessions_total=1,
    )
    hear(model.state, WorkerHeartbeat(fact=fact, circumstance=told), model.at_s)


def test_heartbeats_events_and_intents_reach_the_levels() -> None:
    model = Model(SchedulerState(rules=RULES))
    model.beat("w1")
    model.ask(request(1, curriculum_level=3))
    state = model.state
    assert state.curricula.learners[ONE].level == 3
    assert state.lane_of(ONE) is None
    model.happens(model.tick())
    assert state.lane_of(ONE) in ("w1-0", "w1-1")
    for attempt, expected in ((2, 0), (1, 1)):  # of another attempt a heartbeat says nothing
        for _ in range(7):
            beat(model, 11, attempt=attempt)
            model.pass_s(1)
        found = list(decide_levels(state.curricula, state.lane_of))
        assert len(found) == expected
    issued(state, found[0])
    assert list(decide_levels(state.curricula, state.lane_of)) == []
    withdrawn(state, found[0])
    model.see(event_of(found[0]))
    assert state.curricula.learners[ONE].level == 2
    model.fenced("w1")
    assert state.lane_of(ONE) is None


# -- on servers ------------------------------------------------------------------------------------

EAGER = (
    CONFIG
    + """
curriculum: {lag_steps_high: 5, lag_steps_low: 2, lag_s: 0.5, recover_s: 0.5,
             transition_episodes: 2, return_target: 2.0}
curriculum_transition_threshold: 0.9
"""
)


def logged(one: UUID, step: int) -> tuple[SessionStepped, RewardScored]:
    """A step, of a session whose episodes have one each, and its reward."""
    fact: list[Any] = [None] * len(STEP_FIELDS)
    fact[STEP_FIELDS.index("inputs")] = []
    number, none = struct.pack("<i", step), VarColumn.pack([b""])
    columns = StepColumns(
        session_id=one.bytes,
        attempt=struct.pack("<i", 1),
        step=number,
        episode=number,
        env_reward=struct.pack("<d", 0.0),
        terminated=b"\1",
        truncated=b"\0",
        chain=bytes(32),
        fact=VarColumn.pack([encode(fact)]),
        cause=none,
        observation=none,
        prior=none,
        reset_observation=none,
        extras=none,
        policy=none,
    )
    reward = RewardColumns(
        session_id=one.bytes,
        step=number,
        revision=struct.pack("<i", 1),
        value=struct.pack("<d", 2.0),
        cause=bytes(16),
        fact=VarColumn.pack([encode([step, 1, 2.0, {}, bytes(16)])]),
    )
    return SessionStepped(rows=1, row=columns), RewardScored(rows=1, row=reward)


@dataclass
class Beating:
    """A worker that tells how far the rewards of a session are behind."""

    world: World
    one: UUID | None = None
    lag_steps: int = 0
    steps: int = 40

    async def for_ever(self) -> None:
        fact = HeartbeatFact(
            worker="w1", node="n", state="ready", lanes=["w1-0"], capacity_sessions=9
        )
        n = 0
        while True:
            n += 1
            told = HeartbeatCircumstance()
            if self.one is not None:
                told = HeartbeatCircumstance(
                    sessions=[self.one],
                    attempts=[1],
                    steps=[self.steps],
                    waiting_on=["tick"],
                    reward_lag_steps=[self.lag_steps],
                    sessions_total=1,
                )
            await self.world.bus.publish_transient(
                WorkerHeartbeat(fact=fact, circumstance=told),
                "w1",
                source="test",
                time=utc_now(),
                event_id=f"w1.beat.{n}",
            )
            await asyncio.sleep(0.1)


async def changes(world: World, one: UUID, count: int) -> list[tuple[int, int, str]]:
    """The first changes of a session: number, level, why."""
    found = await world.until(
        lambda: len(got := world.events(CurriculumChanged, session_id=one)) >= count and got
    )
    return [(e.fact.n, e.fact.level, e.circumstance.why) for e in found]


@pytest.mark.nats
@pytest.mark.postgres
async def test_levels_follow_the_lag_also_under_another_scheduler(world: World) -> None:
    world.lead(EAGER)
    worker = Beating(world)
    world.beats["w1"] = asyncio.create_task(worker.for_ever())
    asked = await world.request(curriculum_level=2)
    one = asked.session_id
    await world.placed(one)
    worker.one, worker.lag_steps = one, 6
    assert await changes(world, one, 2) == [(1, 1, "rewards_lag"), (2, 0, "rewards_lag")]
    await world.logged(one, keys.curriculum(2))
    task, stop = world.tasks.pop()
    stop.set()
    await asyncio.wait([task], timeout=10)
    assert task.done()
    await asyncio.to_thread(world.start, "scheduler", EAGER)
    worker.lag_steps = 1
    found = await changes(world, one, 4)
    assert found[2:] == [(3, 1, "rewards_recovered"), (4, 2, "rewards_recovered")]
    await world.logged(one, keys.curriculum(4))
    view = "select n, level, why from curriculum_change where session_id = %(id)s order by n"
    assert [tuple(row.values()) for row in world.sql(view, id=one)] == found


@pytest.mark.nats
@pytest.mark.postgres
async def test_an_agent_goes_up_by_the_returns_in_the_log(world: World) -> None:
    world.lead(EAGER)
    worker = Beating(world)
    world.beats["w1"] = asyncio.create_task(worker.for_ever())
    one = (await world.request(curriculum_level=2)).session_id
    await world.placed(one)
    for step in range(2):
        for event in logged(one, step):
            await world.publish(event, "w1-0")
    worker.one, worker.steps = one, 2
    assert await changes(world, one, 1) == [(1, 3, "threshold")]
    [told] = world.events(CurriculumChanged, session_id=one)
    assert (told.circumstance.episodes, told.circumstance.success_mean) == (2, 1.0)


def test_an_episode_that_is_rewarded_as_a_whole_has_one_reward() -> None:
    levels = Levels()
    levels.curricula.add(ONE, AGENT, 3, 0, per_episode=True)
    learner = levels.curricula.learners[ONE]
    learner.steps = 8

    def read(steps: int, last: int, *rewards: float, finished: bool) -> None:
        at = (last, 0) if finished else None
        levels.curricula.read([Portion(ONE, 0, steps, last, rewards, at=at)])

    read(3, 2, finished=False)
    assert learner.read_steps == 3, "steps within an episode have no reward to wait for"
    read(2, 4, finished=True)
    assert learner.read_steps == 3, "its last step has"
    read(2, 4, 12.5, finished=True)
    assert learner.read_steps == 5
    assert returns_of(levels.curricula) == [12.5]
