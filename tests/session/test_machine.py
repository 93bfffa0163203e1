"""The session machine: its outputs, what it does with inputs, episodes and ends."""

import random
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.session.chain import chain_end, chain_next, chain_start, digest16
from dsec.session.io import SessionConfig, cancel_input, missing_input, reward_input
from dsec.session.machine import SessionMachine
from dsec_contracts.canonical import decode, encode
from dsec_contracts.step import STEP_FIELDS

COUNTER = """
import numpy as np
class Env:
    def __init__(self, length=3, truncates=False, reuse=False):
        self.length, self.truncates, self.reuse = length, truncates, reuse
        self.buffer = np.zeros(2)
        self.resets = 0
    def reset(self, seed=None):
        self.resets += 1
        self.n = 0
        self.buffer[:] = (0, self.resets)
        return (self.buffer if self.reuse else self.buffer.copy()), {}
    def step(self, action):
        self.n += 1
        self.buffer[:] = (self.n, self.resets)
        done = self.n >= self.length
        observation = self.buffer if self.reuse else self.buffer.copy()
        return observation, 1.0, done and not self.truncates, done and self.truncates, {"n": self.n}
"""
NULL_AGENT = """
class Agent:
    def __init__(self, config): self.told, self.seen, self.begun = [], [], []
    def on_episode_start(self, episode): self.begun.append(episode)
    def step(self, observation):
        self.seen.append(observation.copy())
        return {"action": 0}
    def on_reward(self, reward, done, info): self.told.append((reward, done, info))
"""


def fields(stepped):
    return dict(zip(STEP_FIELDS, decode(stepped.fact), strict=True))


def test_the_chain_is_the_hash_of_the_facts(program, run):
    one = run(program(), max_steps=30)
    chain = chain_start(one.started.reset)
    assert chain == one.started.chain
    for stepped in one.stepped:
        chain = chain_next(chain, stepped.fact)
        assert chain == stepped.chain
    end = one.ended
    assert end.chain == chain_end(chain, "completed", "max_steps", 30, end.episodes, end.inputs)


def test_ten_equal_configs_have_ten_equal_chains_and_another_seed_has_another(program, run):
    made = program()
    assert len({run(made, max_steps=60).ended.chain for _ in range(10)}) == 1
    assert run(made, max_steps=60).ended.chain != run(made, seed=8, max_steps=60).ended.chain


def test_a_spec_hash_is_no_part_of_the_chain(program, run):
    env = COUNTER + "\nclass Part:\n    def __init__(self): self.x = {1, 2}\n"
    env += "\nclass Env(Env):\n    def __init__(self):\n        super().__init__()\n"
    env += "        self.part = Part()\n"
    one, two = (
        run(program(NULL_AGENT, env)),
        run(program(NULL_AGENT, env + "# a word that changes the hash\n")),
    )
    assert one.ended.chain == two.ended.chain


def test_an_output_names_the_inputs_since_the_one_before(program, run):
    one = run(program(), max_steps=5)
    assert fields(one.stepped[0])["inputs"] == []
    for before, after, given_input in zip(one.stepped, one.stepped[1:], one.inputs, strict=False):
        assert fields(after)["inputs"] == [["reward", before.step, digest16(given_input.fact)]]
    assert decode(one.ended.inputs) == [["reward", 4, digest16(one.inputs[-1].fact)]]


def test_a_reward_that_comes_twice_counts_once():
    machine = SessionMachine(_shared("cartpole"), SessionConfig(3, 12))
    machine.start()
    first = machine.step()
    reward = reward_input(0, 1.0, encode([0, 1.0]), first.chain[:16])
    for _ in range(2):
        assert machine.deliver(reward) is None
        assert machine.awaiting is None
    assert fields(machine.step())["inputs"] == [["reward", 0, digest16(reward.fact)]]


@settings(max_examples=30, deadline=None)
@given(noise=st.lists(st.integers(0, 11), max_size=40), seed=st.integers(0, 2**32))
def test_repeated_stale_and_foreign_inputs_change_nothing(noise, seed):
    from functools import partial

    made = _shared("cartpole")
    quiet = _drive(made, lambda machine, inputs: None)
    chance = random.Random(seed)

    def disturb(machine, inputs, known):
        for n in chance.sample(noise, len(noise)):
            if n < len(known):
                machine.deliver(known[n])  # of another run of the same session: future ones too

    disturbed = _drive(made, partial(disturb, known=quiet.inputs))
    assert disturbed.machine.ended == quiet.machine.ended
    assert [s.fact for s in disturbed.stepped] == [s.fact for s in quiet.stepped]


_PROGRAMS = {}


def _shared(name):
    if name not in _PROGRAMS:
        from dsec.session.documents import AgentDocument, EnvDocument
        from dsec.session.local import local_program

        source = b"class Agent:\n  def __init__(s, c): s.a = c['action_space']\n"
        source += b"  def step(s, o): return {'action': s.a.sample()}\n"
        _PROGRAMS[name] = local_program(
            AgentDocument(entry="agent.py:Agent"),
            {"agent.py": source},
            EnvDocument(entry="gymnasium:CartPole-v1"),
            {},
        )
    return _PROGRAMS[name]


class _Driven:
    def __init__(self, program):
        self.machine = SessionMachine(program, SessionConfig(3, 12))
        self.stepped, self.inputs = [], []


def _drive(program, disturb):
    one = _Driven(program)
    one.machine.start()
    while one.machine.ended is None:
        disturb(one.machine, one.inputs)
        if one.machine.awaiting is None and one.machine.ended is None:
            stepped = one.machine.step()
            one.stepped.append(stepped)
            cause = stepped.chain[:16]
            fact = encode([stepped.step, 1, 1.0, {"env": [1.0, 1.0]}, cause])
            one.inputs.append(reward_input(stepped.step, 1.0, fact, cause))
            disturb(one.machine, one.inputs)
        one.machine.deliver(one.inputs[-1])
    return one


def test_a_reward_of_another_cause_is_not_delivered(program):
    machine = SessionMachine(program(), SessionConfig(3, 12))
    machine.start()
    stepped = machine.step()
    assert machine.deliver(missing_input(0, "x", True, "", b"\0" * 16)) is None
    assert machine.awaiting == 0
    assert machine.deliver(missing_input(0, "x", True, "no", stepped.chain[:16])).code == "x"


def test_step_is_refused_while_the_session_waits(program, run):
    machine = SessionMachine(program(), SessionConfig(3, 12))
    with pytest.raises(RuntimeError):
        machine.step()
    machine.start()
    machine.step()
    with pytest.raises(RuntimeError):
        machine.step()
    with pytest.raises(RuntimeError):
        run(program()).machine.step()


def test_a_cancel_ends_the_session_at_once_and_later_inputs_change_nothing(program, run):
    one = run(program(), steps=4, max_steps=9)
    ended = one.machine.deliver(cancel_input("deadline", "late"))
    assert (ended.status, ended.code, ended.steps) == ("cancelled", "deadline", 4)
    assert one.machine.deliver(cancel_input("cancelled")) is None
    assert one.machine.ended is ended


# -- episodes


def test_a_reset_is_no_step_and_the_final_observation_is_recorded(program, run):
    one = run(program(NULL_AGENT, COUNTER), max_steps=7)
    assert [s.step for s in one.stepped] == list(range(7))
    assert [s.episode for s in one.stepped] == [0, 0, 0, 1, 1, 1, 2]
    assert [decode(s.observation)[0] for s in one.stepped] == [1, 2, 3, 1, 2, 3, 1]
    assert [bool(s.reset_observation) for s in one.stepped] == [0, 0, 1, 0, 0, 1, 0]
    assert decode(one.stepped[2].reset_observation).tolist() == [0, 2]
    assert fields(one.stepped[2])["reset"][1] == digest16(one.stepped[2].reset_observation)
    assert decode(one.stepped[3].prior).tolist() == [0, 2]
    assert (one.ended.code, one.ended.episodes) == ("max_steps", 2)
    assert one.machine._agent.begun == [0, 1, 2]


@pytest.mark.parametrize("reuse", [False, True])
def test_a_reused_observation_buffer_is_snapshot_at_the_boundary(program, run, reuse):
    one = run(program(NULL_AGENT, COUNTER, kwargs={"reuse": reuse}), max_steps=7)
    assert [decode(s.observation).tolist() for s in one.stepped[:3]] == [[1, 1], [2, 1], [3, 1]]
    told = one.machine._agent.told
    finals = [info["dsec"]["final_observation"] for _, done, info in told if done]
    assert [final.tolist() for final in finals] == [[3, 1], [3, 2]]
    assert all(info["dsec"]["final_observation"] is None for _, done, info in told if not done)
    assert [info["dsec"]["episode"] for _, _, info in told] == [0, 0, 0, 1, 1, 1, 2]
    assert [info["n"] for _, _, info in told] == [1, 2, 3, 1, 2, 3, 1]


def test_a_reused_info_is_snapshot_before_the_next_reset(program, run):
    env = COUNTER.replace('{"n": self.n}', "self.info_of(self.n)").replace(
        "self.n = 0", "self.n = 0; self.info_of(-1)"
    )
    env += "    def info_of(self, n):\n"
    env += "        self.info = getattr(self, 'info', {}); self.info['n'] = n; return self.info\n"
    told = run(program(NULL_AGENT, env), max_steps=4).machine._agent.told
    assert [info["n"] for _, _, info in told] == [1, 2, 3, 1]


@pytest.mark.parametrize("truncates", [False, True])
def test_terminated_and_truncated_are_the_environments_own(program, run, truncates):
    one = run(program(NULL_AGENT, COUNTER, kwargs={"truncates": truncates}), max_steps=4)
    assert [s.terminated for s in one.stepped] == [False, False, not truncates, False]
    assert [s.truncated for s in one.stepped] == [False, False, truncates, False]
    told = one.machine._agent.told[2][2]["dsec"]
    assert (told["terminated"], told["truncated"]) == (not truncates, truncates)


def test_a_cut_by_max_steps_is_no_truncation_of_the_environments(program, run):
    one = run(program(NULL_AGENT, COUNTER), max_steps=2)
    assert (one.ended.status, one.ended.code, one.ended.episodes) == ("completed", "max_steps", 0)
    assert not one.stepped[-1].truncated
    assert not one.machine._agent.told[-1][1]


def test_episodes_max_ends_without_another_reset(program, run):
    one = run(program(NULL_AGENT, COUNTER, episodes_max=2), max_steps=100)
    assert (one.ended.code, one.ended.steps, one.ended.episodes) == ("episodes_max", 6, 2)
    assert one.stepped[-1].reset_observation == b""
    assert one.machine._agent.told[-1][2]["dsec"]["final_observation"].tolist() == [3, 2]


def test_a_reset_that_fails_keeps_the_step_before_it(program, run):
    env = COUNTER.replace("self.resets += 1", "self.resets += 1; assert self.resets < 2")
    kept = NULL_AGENT.replace("self.told,", "Agent.last = self; self.told,")
    made = program(kept, env)
    one = run(made, max_steps=9)
    assert (one.ended.status, one.ended.code) == ("failed", "env_raised")
    assert "assert self.resets < 2" in one.ended.message
    assert one.ended.steps == len(one.stepped) == 3
    assert one.ended.episodes == 1
    assert fields(one.stepped[-1])["reset"] is None
    told = made.agent_class.last.told
    assert told[-1][2]["dsec"]["final_observation"].tolist() == [3, 1]
    assert decode(one.ended.inputs) == [["reward", 2, digest16(one.inputs[-1].fact)]]


def test_a_reset_with_a_huge_info_ends_the_session_before_its_row_is_too_large(program, run):
    env = COUNTER.replace("self.buffer.copy()), {}", "self.buffer.copy()), self.huge()")
    env += "    def huge(self): return {'x': b'x' * (500_000 if self.resets > 1 else 1)}\n"
    one = run(program(NULL_AGENT, env), max_steps=9)
    assert (one.ended.code, one.ended.steps) == ("too_large", 3)
    first = run(program(NULL_AGENT, env.replace("> 1 else", "> 0 else")), max_steps=9)
    assert (first.ended.code, first.started) == ("too_large", None)


def test_the_agents_action_space_is_seeded_and_its_own(program, run):
    agent = NULL_AGENT.replace("self.told,", "self.space = config['action_space']; self.told,")
    one = run(program(agent), seed=5)
    other = run(program(agent), seed=5)
    a, b = one.machine._agent.space, other.machine._agent.space
    assert a is not one.machine._env.action_space
    assert [a.sample() for _ in range(20)] == [b.sample() for _ in range(20)]


def test_agent_streams_hold_the_environment_and_vary_the_agent(program, run):
    made = program()
    one, other = (run(made, agent_stream=n, max_steps=40) for n in (0, 1))
    assert one.started == other.started
    actions = [[fields(s)["action"] for s in r.stepped] for r in (one, other)]
    assert actions[0] != actions[1]


def test_no_identity_reaches_the_agent(program, run):
    agent = NULL_AGENT.replace("self.told,", "self.config = config; self.told,")
    config = run(program(agent)).machine._agent.config
    assert set(config) == {
        "params",
        "observation_space",
        "action_space",
        "tools",
        "resource_profile",
        "max_steps",
        "seed",
        "anchor_id",
    }


def test_action_params_reach_the_environment_with_the_action(program, run):
    agent = NULL_AGENT.replace(
        '{"action": 0}', '{"action": 1, "action_params": {"x": 2}, "extras": {"logp": -0.5}}'
    )
    env = COUNTER.replace("self.n += 1", 'self.n += action["action_params"]["x"]')
    one = run(program(agent, env), max_steps=2)
    assert fields(one.stepped[0])["action"] == {"action": 1, "action_params": {"x": 2}}
    assert decode(one.stepped[0].extras) == {"extras": {"logp": -0.5}}


def test_extras_are_no_part_of_the_chain(program, run):
    one = run(program(NULL_AGENT, COUNTER))
    agent = NULL_AGENT.replace('{"action": 0}', '{"action": 0, "extras": {"logp": 1}}')
    assert run(program(agent, COUNTER)).ended.chain == one.ended.chain


def test_an_async_step_is_run(program, run):
    agent = NULL_AGENT.replace("def step", "async def step")
    assert run(program(agent, COUNTER)).ended.chain == run(program(NULL_AGENT, COUNTER)).ended.chain


def test_a_policy_is_told_before_the_first_step(program, run):
    agent = NULL_AGENT + "    def on_policy(self, version, state): self.policy = version, state\n"
    one = run(program(agent, COUNTER), policy_version="p@1", policy_state={"w": np.ones(2)})
    assert one.machine._agent.policy[0] == "p@1"


def test_the_message_of_an_end_is_bounded(program, run):
    agent = NULL_AGENT.replace('return {"action": 0}', "raise ValueError('x' * 100_000)")
    assert len(run(program(agent, COUNTER)).ended.message) <= 8000


def test_a_session_that_fails_lets_go_of_its_agent_at_once(program):
    """What it held, files say, is another session's to take in the same tick."""
    agent = (
        "class Agent:\n"
        "    def __init__(self, config): self.kept = [open('/dev/null') for _ in range(8)]\n"
        "    def step(self, observation): raise OSError(24, 'Too many open files')\n"
    )
    machine = SessionMachine(program(agent), SessionConfig(7, 10))
    machine.start()
    held = weakref.ref(machine._agent)
    assert machine.step().code == "agent_raised"
    assert held() is None
