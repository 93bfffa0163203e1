"""An environment that raises: at an action that is none of its own, it is the agent's fault."""

from dataclasses import replace

import pytest
from tests.session.test_user_code import AGENT, ENV, put, verify_failure

from dsec.session.chain import chain_end
from dsec.session.machine import SessionMachine
from dsec.session.recorded import Recorded
from dsec.session.rerun import rerun

SPACED = "import gymnasium, numpy\n" + ENV.replace(
    "class Env:",
    "class Env:\n    action_space = gymnasium.spaces.Discrete(2)\n"
    "    params = {'action': action_space, 'action_params': action_space}",
)
CULPRIT = "raise ValueError('the culprit')"


def asserting(space, line="assert self.action_space.contains(action)"):
    """An environment that holds actions against its space."""
    return put(SPACED, "init", f"self.action_space = {space}").replace(
        "        return 0, 1.0, False", f"        {line}\n        return 0, 1.0, False"
    )


def returning(given):
    """An agent that does."""
    return "import numpy\n" + put(AGENT, "step", f"return {{{given}}}")


@pytest.mark.parametrize(
    ("space", "action"),
    [
        ("gymnasium.spaces.Discrete(2)", "'action': 7"),
        ("gymnasium.spaces.Discrete(2)", "'action': numpy.int64(7)"),
        ("gymnasium.spaces.Discrete(2)", "'action': 'left'"),
        ("gymnasium.spaces.Discrete(2)", "'action': None"),
        ("gymnasium.spaces.Discrete(2)", "'action': 7, 'action_params': {'by': 3}"),
        ("gymnasium.spaces.MultiDiscrete([2, 3])", "'action': numpy.array([1, 3])"),
        ("gymnasium.spaces.Box(-1, 1, (2,))", "'action': numpy.array([0, 2], 'f4')"),
        ("gymnasium.spaces.Text(3)", "'action': 'four'"),
        ("gymnasium.spaces.Dict(self.params)", "'action': 1, 'action_params': 2"),
    ],
)
def test_an_action_outside_its_space_is_the_agents(program, run, space, action):
    made = program(returning(action), asserting(space))
    one = run(made)
    verify_failure(made, one, "action_invalid", 0)
    said = one.ended.message.splitlines()[-1]
    assert "step() returned the action" in said
    assert space.partition("(")[0].rpartition(".")[2] in said
    assert "in step" in one.ended.message  # where the environment raised


def test_an_environment_of_gymnasium_that_is_given_what_is_no_action(program, run):
    made = program(returning("'action': 7"), "gymnasium:CartPole-v1")
    one = run(made)
    verify_failure(made, one, "action_invalid", 0)
    told = "step() returned the action 7, outside Discrete(2)"
    assert one.ended.message.splitlines()[-1] == told


@pytest.mark.parametrize(
    ("space", "action"),
    [
        ("gymnasium.spaces.Discrete(2)", "'action': 1"),
        ("gymnasium.spaces.Discrete(2)", "'action': numpy.int64(1)"),
        ("gymnasium.spaces.Box(-1, 1, (2,))", "'action': numpy.zeros(2, 'f4')"),
        ("gymnasium.spaces.Tuple([self.action_space] * 2)", "'action': (0, 1)"),
        ("gymnasium.spaces.Discrete(2)", "'action': 1, 'action_params': {'by': 3}"),
        ("gymnasium.spaces.Dict(self.params)", "'action': 1, 'action_params': 1"),
        ("None", "'action': 7"),
        ("object()", "'action': 7"),
    ],
)
def test_an_environment_that_raises_at_one_of_its_actions(program, run, space, action):
    made = program(returning(action), asserting(space, CULPRIT))
    one = run(made)
    verify_failure(made, one, "env_raised", 0)
    assert one.ended.message.rstrip().endswith("the culprit")


def test_an_environment_that_spoils_an_action_and_raises_at_it(program, run):
    env = asserting("gymnasium.spaces.Box(-1, 1, (2,))", f"action[:] = 9; {CULPRIT}")
    made = program(returning("'action': numpy.zeros(2, 'f4')"), env)
    verify_failure(made, run(made), "env_raised", 0)


@pytest.mark.parametrize("line", ["raise KeyError('odd')", "raise SystemExit(3)"])
@pytest.mark.parametrize("asked", ["contains(self, x)", "__repr__(self)"])
def test_a_space_that_raises_when_it_is_asked(program, run, asked, line):
    space = f"class Space:\n    def contains(self, x): return False\n    def {asked}: {line}\n"
    made = program(AGENT, space + asserting("Space()", CULPRIT))
    one = run(made)
    verify_failure(made, one, "env_raised", 0)
    assert "the culprit" in one.ended.message


def test_a_long_traceback_leaves_room_for_the_action(program, run):
    env = asserting("self.action_space", "raise ValueError('much ' * 5000)")
    one = run(program(returning("'action': 7"), env))
    assert one.ended.message.endswith("step() returned the action 7, outside Discrete(2)")


def test_a_log_that_is_older_than_the_code_of_an_invalid_action_verifies(program, run):
    made = program(returning("'action': 7"), asserting("self.action_space"))
    one = run(made)
    assert one.ended.code == "action_invalid"
    chain = chain_end(one.started.chain, "failed", "env_raised", 0, 0, one.ended.inputs)
    older = replace(one.ended, code="env_raised", chain=chain)
    for ended, field in ((older, None), (replace(older, chain=one.ended.chain), "chain")):
        recorded = Recorded(one.started.reset, one.started.chain, [], one.inputs, ended)
        divergence = rerun(SessionMachine(made, one.machine.config), recorded)
        assert (divergence and divergence.field) == field
