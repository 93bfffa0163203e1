"""What cannot be executed again is verified by its record, which contradicts itself nowhere."""

import pytest
from tests.replay.conftest import SESSION_ID

from dsec.replay.verify import verify
from dsec.reward.score import EnvScorer
from dsec.session.documents import AgentDocument, EnvDocument
from dsec.session.io import SessionConfig
from dsec.session.local import local_program, run_in_memory
from dsec_contracts.canonical import decode, encode

CONFIG = SessionConfig(7, 20)
AGENT = b"class A:\n    def __init__(self, c): ...\n    def step(self, o): return {'action': 0}\n"
ENV = b"""
import gymnasium, numpy as np
class Env(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 255, (4,), np.uint8)
    def reset(self, *, seed=None, options=None):
        return self.rolled(), {}
    def step(self, action):
        return self.rolled(), 1.0, False, False, {}
    def rolled(self):
        self.roll = np.frombuffer(open("/dev/urandom", "rb").read(4), np.uint8).copy()
        return self.roll
"""


def program_of(**options):
    agent = AgentDocument(entry="agent.py:A")
    env = EnvDocument(entry="env.py:Env", **options)
    return local_program(agent, {"agent.py": AGENT}, env, {"env.py": ENV})


@pytest.fixture(scope="module")
def program():
    return program_of(deterministic_mode=False)


@pytest.fixture(scope="module")
def rows(program):
    return run_in_memory(program, CONFIG, SESSION_ID, EnvScorer())


def check(program, rows):
    return verify(rows, program, CONFIG, EnvScorer())


def test_a_whole_record_is_told_from_one_that_was_executed_again(program, rows):
    for cut in (0, 1, 7, len(rows)):
        verdict = check(program, rows[:cut])
        assert (verdict.ok, verdict.determinism) == (True, "D0")
    assert (verdict.complete, verdict.steps, verdict.rewards_compared) == (True, 20, 20)
    executed = check(program_of(), rows)
    assert (executed.ok, executed.determinism) == (False, "D2")


def changed(rows, key, change):
    return [row._replace(fact=change(row.fact)) if row.key == key else row for row in rows]


def with_field(n, value):
    def change(fact):
        fields = decode(fact)
        fields[n] = value
        return encode(fields)

    return change


@pytest.mark.parametrize("step", [0, 11, 19])
def test_a_changed_step_breaks_the_chain(program, rows, step):
    verdict = check(program, changed(rows, f"step:{step}", with_field(4, 1)))
    assert (verdict.first_divergence.step, verdict.first_divergence.field) == (step, "chain")


def test_a_reward_that_is_gone_is_named_by_the_step_that_heard_it(program, rows):
    verdict = check(program, [row for row in rows if row.key != "reward:5.1"])
    found = verdict.first_divergence
    assert (found.step, found.field, found.actual) == (6, "inputs", None)


def test_a_changed_reward_is_another_input(program, rows):
    verdict = check(program, changed(rows, "reward:5.1", with_field(2, 3.0)))
    assert verdict.first_divergence.step in (5, 6)
    assert verdict.reward_ok is False


@pytest.mark.parametrize(("name", "value"), [("steps", 19), ("status", "failed"), ("chain", b"x")])
def test_a_changed_end_does_not_close_the_chain(program, rows, name, value):
    false = rows[-1]._replace(fact=encode({**decode(rows[-1].fact), name: value}))
    found = check(program, [*rows[:-1], false]).first_divergence
    assert (found.step, found.field) == (None, "steps" if name == "steps" else "chain")


def test_a_changed_start_is_named(program, rows):
    started = next(row for row in rows if row.kind == "session.started")
    other = encode({**decode(started.fact), "chain": bytes(32)})
    verdict = check(program, changed(rows, started.key, lambda _: other))
    assert verdict.first_divergence.field == "chain_0"


def test_observations_that_cannot_be_had_again_are_recorded():
    with pytest.raises(ValueError, match="use reference"):
        EnvDocument(entry="x:Y", deterministic_mode=False, observations={"above": "none"})


def test_a_spec_without_the_key_keeps_its_name():
    assert "deterministic_mode" not in EnvDocument(entry="x:Y").model_dump()
