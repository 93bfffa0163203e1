"""The curriculum: a change of the level is delivered at the next reset, wherever in an episode it
came, and a restart, a verification and a restored anchor find it there again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.session.shuffled import run_shuffled

from dsec.replay.verify import verify
from dsec.reward.score import EnvScorer
from dsec.session.anchor_restore import restored
from dsec.session.documents import AgentDocument, EnvDocument
from dsec.session.io import (
    CURRICULUM,
    SessionConfig,
    Stepped,
    curriculum_input,
    deferred_input,
    reward_input,
)
from dsec.session.local import local_program, run_in_memory
from dsec.session.machine import SessionMachine
from dsec.session.recorded import Recorded
from dsec.session.rerun import rerun, undelivered
from dsec_contracts.canonical import decode, encode
from dsec_contracts.step import STEP_FIELDS

STEPS, EPISODE_STEPS = 14, 3
AGENT = """
class Agent:
    def __init__(self, config):
        self.space, self.heard = config["action_space"], [config.get("curriculum_level", -1)]
    def step(self, observation):
        return {"action": self.space.sample() ^ (sum(map(sum, self.heard[1:])) & 1)}
    def on_reward(self, reward, done, info):
        told = info["dsec"]
        self.heard.append((told["step"], told["episode"], told.get("curriculum_level", -1)))
    def get_state(self): return [self.heard[0], list(map(list, self.heard[1:]))]
    def set_state(self, state): self.heard = [state[0], *map(tuple, state[1])]
"""
ENV = """
import gymnasium, numpy as np
class Env(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-1, 99, (2,), np.int64)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n, self.level = 0, -1 if options is None else options["curriculum_level"]
        assert options is None or list(options) == ["curriculum_level"]
        return np.array([self.level, 0]), {}
    def step(self, action):
        self.n += 1
        drawn = int(self.np_random.integers(0, 10 + self.level))
        return np.array([self.level, drawn]), float(action), self.n == 3, False, {}
"""
PLAIN_CHAIN = "d107d29de18ed213cf8201dc8631ff23497e9210b5fef8b9e1e51d4a39af890a"
BARE = ENV.replace(", options=None):", "):\n        options = None")


def program_of(env: str = ENV, **options: Any):
    return local_program(
        AgentDocument(entry="agent.py:Agent", **options),
        {"agent.py": AGENT.encode()},
        EnvDocument(entry="env.py:Env"),
        {"env.py": env.encode()},
    )


def config(level: int | None = 3, lag: int | None = None) -> SessionConfig:
    return SessionConfig(11, STEPS, lag_steps=lag, reward_lag_steps_max=5, curriculum_level=level)


def rewarded(stepped: Stepped):
    cause = stepped.chain[:16]
    value = stepped.env_reward
    fact = encode([stepped.step, 1, value, {"env": [value, 1.0]}, cause])
    return reward_input(stepped.step, value, fact, cause)


def level_of(stepped: Stepped) -> int:
    return int(decode(stepped.observation)[0])


def changes_named(fact: bytes) -> list[int]:
    named = decode(fact)[STEP_FIELDS.index("inputs")]
    return [ordinal for kind, ordinal, _ in named if kind == CURRICULUM]


def play(machine: SessionMachine, given: dict[int, list[Any]], *, first=False) -> list[Stepped]:
    """To the end; before step n, or, if `first`, before the reward of the step before it, what is
    given at n is delivered."""
    steps: list[Stepped] = []
    while machine.ended is None:
        for one in given.get(machine.steps, []) if not first or not steps else []:
            machine.deliver(one)
        output = machine.step()
        assert isinstance(output, Stepped)
        steps.append(output)
        for one in given.get(machine.steps, []) if first else []:
            machine.deliver(one)
        machine.deliver(rewarded(output))
    return steps


def machine_of(level: int | None = 3, env: str = ENV) -> SessionMachine:
    machine = SessionMachine(program_of(env), config(level))
    machine.start()
    return machine


# -- at the border, and nowhere else ---------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("at", range(STEPS))
def test_a_change_is_delivered_at_the_reset_of_the_next_episode(at: int, first: bool) -> None:
    machine = machine_of()
    steps = play(machine, {at: [curriculum_input(1, 2)]}, first=first)
    # Behind the step that ended an episode the next one has been reset already.
    border = (at // EPISODE_STEPS + 1) * EPISODE_STEPS
    assert [level_of(one) for one in steps] == [3 if n < border else 2 for n in range(STEPS)]
    named = {one.step: changes_named(one.fact) for one in steps if changes_named(one.fact)}
    assert named == ({border - 1: [1]} if border <= STEPS - 1 else {})
    heard = machine._agent.heard
    assert heard[0] == 3
    assert [one[2] for one in heard[1:]] == [3 if n < border else 2 for n in range(STEPS)]


def test_of_several_changes_the_last_one_is_delivered_and_stale_ones_are_not() -> None:
    one, two, three = (curriculum_input(n, level) for n, level in ((1, 2), (2, 1), (3, 5)))
    machine = machine_of()
    steps = play(machine, {0: [two, one, two], 4: [one, two], 7: [two, three], 8: [three, one]})
    assert [level_of(one) for one in steps] == [3] * 3 + [1] * 6 + [5] * 5
    assert {n: changes_named(steps[n].fact) for n in (2, 5, 8, 11)} == {
        2: [2],
        5: [],
        8: [3],
        11: [],
    }


def test_a_session_without_a_curriculum_knows_nothing_of_it() -> None:
    plain = machine_of(None, BARE)
    steps = play(plain, {2: [curriculum_input(1, 2)]})
    assert plain.ended == play_end(machine_of(None, BARE)) == play_end(machine_of(None))
    assert {level_of(one) for one in steps} == {-1}
    assert plain._agent.heard[0] == -1
    assert {one[2] for one in plain._agent.heard[1:]} == {-1}


def test_a_session_without_a_curriculum_keeps_its_bytes() -> None:
    """The chain of a session from before there was a curriculum."""
    end = play_end(machine_of(None))
    assert end.chain.hex() == PLAIN_CHAIN


def test_a_level_that_is_given_from_the_start_is_the_level_of_all_episodes() -> None:
    steps = play(machine := machine_of(4), {})
    assert {level_of(one) for one in steps} == {4}
    assert machine._agent.heard[0] == 4


def play_end(machine: SessionMachine):
    play(machine, {})
    return machine.ended


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_environment_without_options_is_refused_at_the_start(wrapped: bool) -> None:
    env = BARE
    if wrapped:
        env = ENV + (
            "Inner = Env\nclass Outer(gymnasium.Wrapper):\n    def reset(self, *, seed=None):\n"
            "        return self.env.reset(seed=seed)\n"
            "def Env(): return Outer(gymnasium.wrappers.TimeLimit(Inner(), 9))\n"
        )
    machine = SessionMachine(program_of(env), config(3))
    machine.start()
    assert (machine.ended.status, machine.ended.code) == ("failed", "env_invalid")
    assert "options" in machine.ended.message
    assert "curriculum_level" in machine.ended.message
    assert play_end(machine_of(None, env)).status == "completed"


def test_registered_environments_take_the_level() -> None:
    program = local_program(
        AgentDocument(entry="agent.py:Agent"),
        {"agent.py": AGENT.encode()},
        EnvDocument(entry="gymnasium:Taxi-v4"),
        {},
    )
    machine = SessionMachine(program, config(3))
    machine.start()
    assert machine.ended is None


# -- late rewards ----------------------------------------------------------------------------------


def test_a_late_reward_is_told_with_the_level_of_its_own_episode() -> None:
    machine = machine_of()
    machine.deliver(curriculum_input(1, 1))
    late = []
    for _ in range(4):
        late.append(machine.step())
        machine.deliver(deferred_input(late[-1].step, "slow", late[-1].chain[:16]))
    assert level_of(late[3]) == 1
    for one in reversed(late):
        machine.deliver(rewarded(one))
    assert machine._agent.heard[1:] == [(3, 1, 1), (2, 0, 3), (1, 0, 3), (0, 0, 3)]


def test_old_levels_are_forgotten_once_nobody_is_told_of_them() -> None:
    machine = SessionMachine(program_of(), SessionConfig(1, 3 * 60, curriculum_level=0))
    machine.start()
    play(machine, {3 * n: [curriculum_input(n, n)] for n in range(1, 59)})
    assert len(machine._curriculum._levels) <= 2


# -- from the log ----------------------------------------------------------------------------------


def shuffled(session_id, seed: int, *, lag: int | None = None, levels=(2, 4, 1), **options: Any):
    program = options.pop("program", None) or program_of()
    return run_shuffled(
        program, config(3, lag), session_id, EnvScorer(), random.Random(seed), levels=levels,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("lag", [None, 2])
def test_every_run_verifies(session_id, lag) -> None:
    delivered = set()
    for seed in range(12):
        rows = shuffled(session_id, seed, lag=lag)
        verdict = verify(rows, program_of(), config(3, lag), EnvScorer())
        assert (verdict.ok, verdict.complete) == (True, True), verdict.first_divergence
        recorded = Recorded.from_rows(rows)
        delivered.add(tuple(n for step in recorded.steps for n in changes_named(step.fact)))
    assert len(delivered) > 2


def test_a_change_that_nobody_asked_for_is_a_divergence(session_id) -> None:
    rows = next(
        rows
        for rows in (shuffled(session_id, seed) for seed in range(50))
        if any(changes_named(step.fact) for step in Recorded.from_rows(rows).steps)
    )
    without = [row for row in rows if row.kind != "curriculum.changed"]
    found = verify(without, program_of(), config(), EnvScorer()).first_divergence
    assert found.field == "inputs"
    other = [
        row._replace(fact=encode(decode(row.fact) | {"level": 9}))
        if row.kind == "curriculum.changed"
        else row
        for row in rows
    ]
    found = verify(other, program_of(), config(), EnvScorer()).first_divergence
    assert found.field == "inputs"


def go_live(machine: SessionMachine, recorded: Recorded):
    for one in undelivered(recorded, machine):
        machine.deliver(one)
    while machine.ended is None:
        steps = [] if machine.late is None else machine.late.unanswered_steps()
        if machine.awaiting is not None and machine.awaiting >= 0:
            steps.append(machine.last)
        for stepped in steps:
            machine.deliver(rewarded(stepped))
        if machine.ended is None and machine.awaiting is None:
            machine.step()
    return machine.ended


@pytest.mark.parametrize("lag", [None, 2])
def test_a_restart_at_any_row_goes_on(session_id, lag) -> None:
    rows = shuffled(session_id, 2, lag=lag)
    assert any(changes_named(step.fact) for step in Recorded.from_rows(rows).steps)
    for cut in range(len(rows) + 1):
        recorded = Recorded.from_rows(rows[:cut])
        machine = SessionMachine(program_of(), config(3, lag))
        assert rerun(machine, recorded) is None, cut
        if recorded.reset is None:
            machine.start()
        end = go_live(machine, recorded)
        assert (end.status, end.code) == ("completed", "max_steps")
        if cut == len(rows):
            assert end == Recorded.from_rows(rows).ended


def test_a_restart_takes_the_logged_changes_that_no_output_names(session_id) -> None:
    whole = machine_of()
    change = [curriculum_input(1, 2), curriculum_input(2, 5)]
    play(whole, {4: change})
    rows = run_in_memory(program_of(), config(), session_id, EnvScorer(), steps_max=5)
    recorded = Recorded.from_rows(rows)
    recorded.inputs += change
    machine = SessionMachine(program_of(), config())
    assert rerun(machine, recorded) is None
    assert go_live(machine, recorded) == whole.ended


def test_a_restart_from_any_anchor_has_the_level(session_id) -> None:
    program, blobs = program_of(anchors={"every_steps": 1}), {}
    rows = shuffled(session_id, 2, program=program, blobs=blobs)
    whole, changed = Recorded.from_rows(rows), 0
    for position, anchor in whole.anchors.items():
        before = whole.steps[position - 1]
        pristine = SessionMachine(program, config())
        machine = restored(
            pristine, blobs[anchor.blob], anchor.anchor_id, before.fact, before.chain
        )
        changed += machine._curriculum._ordinal > 0
        assert rerun(machine, Recorded.from_rows(rows)) is None
        assert machine.ended == whole.ended
    assert changed > 2


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_repetition_and_order_change_nothing(data) -> None:
    """What is delivered at a border depends on which changes came, not on how often or in which
    order; and what was delivered before is not delivered again."""
    changes = [curriculum_input(n, level) for n, level in ((1, 2), (2, 5), (3, 0), (4, 7))]
    portions = [data.draw(st.lists(st.sampled_from(changes))) for _ in range(4)]
    orderly, newest = {}, 0
    for n, portion in enumerate(portions):
        newest = max([newest, *(one.ordinal for one in portion)])
        orderly[n * EPISODE_STEPS] = changes[newest - 1 : newest] if newest else []
    disorderly = {
        n * EPISODE_STEPS + data.draw(st.integers(0, EPISODE_STEPS - 1)): portion
        for n, portion in enumerate(portions)
    }
    one, two = machine_of(), machine_of()
    play(one, orderly)
    play(two, disorderly)
    assert one.ended == two.ended
