"""Values, spaces and environments: whatever Gymnasium allows is recorded and comes again."""

import math
import struct

import pytest

from dsec.session.io import SessionConfig
from dsec.session.machine import SessionMachine
from dsec.session.recorded import Recorded, RecordedStep
from dsec.session.rerun import rerun
from dsec_contracts.canonical import decode, encode
from dsec_contracts.step import STEP_FIELDS

SPACES = {
    "Box": "Box(-1, 1, (2, 3), np.float32)",
    "Box_uint8": "Box(0, 255, (4, 4, 3), np.uint8)",
    "Box_unbounded": "Box(-np.inf, np.inf, (), np.float64)",
    "Discrete": "Discrete(5, start=-2)",
    "MultiBinary": "MultiBinary([2, 3])",
    "MultiDiscrete": "MultiDiscrete([3, 4])",
    "Text": "Text(min_length=1, max_length=9)",
    "Tuple": "Tuple((Discrete(2), Box(0, 1, (2,)), Text(4)))",
    "Dict": "Dict({'b': Discrete(2), 'a': Dict({'x': Box(0, 1, (2,)), 'y': MultiBinary(3)})})",
    "Sequence": "Sequence(Discrete(3))",
    "Sequence_stacked": "Sequence(Box(0, 1, (2,)), stack=True)",
    "Graph": "Graph(node_space=Box(0, 1, (2,)), edge_space=Discrete(3))",
    "OneOf": "OneOf((Discrete(2), Box(0, 1, (2,))))",
}
SPACE_ENV = """
import gymnasium, numpy as np
from gymnasium.spaces import *
class Env(gymnasium.Env):
    def __init__(self, space):
        self.observation_space = eval(space)
        self.action_space = eval(space)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.n = 0
        return self.observation_space.sample(), {}
    def step(self, action):
        self.n += 1
        observation = self.observation_space.sample()
        return observation, float(self.np_random.normal()), self.n % 4 == 0, False, {"got": action}
"""
GYMNASIUM = (
    "CartPole-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Acrobot-v1",
    "Pendulum-v1",
    "FrozenLake-v1",
    "Taxi-v4",
    "Blackjack-v1",
    "CliffWalking-v1",
)


def recorded_of(one):
    return Recorded(
        one.started.reset,
        one.started.chain,
        [RecordedStep(s.step, s.fact, s.chain) for s in one.stepped],
        one.inputs,
        one.ended,
    )


def comes_again(program, one):
    assert one.ended.status == "completed", one.ended.message
    machine = SessionMachine(program, one.machine.config)
    assert rerun(machine, recorded_of(one)) is None
    assert machine.ended == one.ended


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_every_space_is_recorded_and_comes_again(program, run, space):
    made = program(env=SPACE_ENV, kwargs={"space": space})
    one = run(made, max_steps=13)
    comes_again(made, one)
    for stepped in one.stepped:
        assert encode(decode(stepped.observation)) == stepped.observation
    assert len({s.observation for s in one.stepped}) > 1


@pytest.mark.parametrize("name", GYMNASIUM)
def test_the_environments_of_gymnasium_come_again(program, run, name):
    made = program(env=f"gymnasium:{name}")
    one = run(made, max_steps=250)
    comes_again(made, one)
    assert run(made, max_steps=250).ended.chain == one.ended.chain
    assert run(made, seed=8, max_steps=250).ended.chain != one.ended.chain


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Taxi-v4"])
def test_twin_rollouts_equal_gymnasium_itself(program, run, name):
    """The machine adds nothing: the same seeds and actions, stepped by hand, give the same."""
    import gymnasium
    import numpy as np

    from dsec.session.seeds import derive

    one = run(program(env=f"gymnasium:{name}"), max_steps=60)
    env = gymnasium.make(name, disable_env_checker=True)
    env.reset(seed=derive(7, "env", 0) & 0x7FFF_FFFF)
    for stepped in one.stepped:
        action = decode(stepped.fact)[STEP_FIELDS.index("action")]
        observation, reward, terminated, truncated, _ = env.step(action)
        assert np.array_equal(observation, decode(stepped.observation))
        assert (reward, terminated, truncated) == (
            stepped.env_reward,
            stepped.terminated,
            stepped.truncated,
        )
        if terminated or truncated:
            env.reset(seed=derive(7, "env", stepped.episode + 1) & 0x7FFF_FFFF)


VALUES = """[float("nan"), float("inf"), float("-inf"), -0.0, 1e16, 5e-324, "a\\0b",
 "\\ud800", b"\\xff", 2**70, (1, 2), {1: "x", "y": None}, True]"""
VALUE_ENV = f"""
import math
VALUES = {VALUES}
class Env:
    def reset(self, seed=None):
        self.n = -1
        return list(VALUES), {{"values": list(VALUES)}}
    def step(self, action):
        self.n += 1
        reward = [math.nan, math.inf, -math.inf, -0.0, 1e16][self.n % 5]
        return VALUES[self.n % len(VALUES)], reward, False, False, {{"v": VALUES, "a": action}}
"""
VALUE_AGENT = f"""
VALUES = {VALUES}
class Agent:
    def __init__(self, config): self.n, self.heard = -1, []
    def step(self, observation):
        self.n += 1
        return {{"action": VALUES[self.n % len(VALUES)], "extras": {{"v": VALUES}}}}
    def on_reward(self, reward, done, info): self.heard.append(reward)
"""


def test_values_that_json_loses_are_kept(program, run):
    made = program(VALUE_AGENT, VALUE_ENV)
    one = run(made, max_steps=26)
    comes_again(made, one)
    expected = [math.nan, math.inf, -math.inf, -0.0, 1e16] * 6
    for n, stepped in enumerate(one.stepped):
        fact = decode(stepped.fact)
        again = fact[STEP_FIELDS.index("env_reward")]
        assert struct.pack("<d", again) == struct.pack("<d", expected[n])
        assert encode(fact[STEP_FIELDS.index("action")]) == stepped.observation
        assert decode(stepped.extras)["extras"]["v"][6:8] == ["a\0b", "\ud800"]
    heard = one.machine._agent.heard
    assert [struct.pack("<d", r) for r in heard] == [struct.pack("<d", r) for r in expected[:26]]


STATES = {
    "set": "self.x = {str(self.n), 'a', ('b', self.n)}",
    "set in a dict": "self.x = {'k': [{str(n) for n in range(self.n + 5)}]}",
    "numpy generator": "self.x = np.random.default_rng(self.n)",
    "generator in a list": "self.x = [np.random.RandomState(self.n), random.Random(self.n)]",
    "object": "self.x = Thing(self.n)",
    "nested objects": "self.x = Thing(Thing([Thing(self.n)]))",
    "slots": "self.x = Slotted(self.n)",
    "second of two objects": "self.x = [Thing(1), Thing(2), Thing(self.n)]",
    "second of two arrays of objects": (
        "self.x = [np.array([1, 'x'], dtype=object), np.array([self.n, 'y'], dtype=object)]"
    ),
    "second of two deques": "self.x = [collections.deque([1]), collections.deque([self.n])]",
    "deque": "self.x = collections.deque([Thing(1), self.n], maxlen=4)",
    "deque of a class": "self.x = Queue([self.n]); self.x.label = 1",
    "date and partial": (
        "self.x = [datetime.datetime(2020, 1, 1 + self.n), functools.partial(print, self.n)]"
    ),
    "iterator": "self.x = iter([1] * 9); list(zip(range(self.n), self.x))",
    "cycle": "self.x = Thing(self.n); self.x.me = self.x",
    "array of objects": "self.x = {'a': np.array([Thing(self.n), 'b'], dtype=object)}",
    "array that becomes one of objects": (
        "self.x = np.array([Thing(self.n)], dtype=object) if self.n % 2 else np.ones(3) * self.n"
    ),
    "array that is not contiguous": "self.x = (np.arange(10) + self.n)[::2]",
    "dates": "self.x = np.array(['2020-01-01'], 'M8[D]') + self.n",
    "large": "self.x = {n: [n + self.n] * 3 for n in range(300)}",
    "attribute that comes and goes": "setattr(self, f'x{self.n}', {1}); vars(self).pop('x0', 0)",
    "attribute that changes its sort": (
        "self.x = [1, 'a', {2}, None, np.ones(2), Thing(1)][self.n % 6]"
    ),
}
STATE_ENV = """
import collections, datetime, functools, random
import numpy as np
class Queue(collections.deque): pass
class Thing:
    def __init__(self, value): self.value = value
class Slotted:
    __slots__ = ("value", "__private")
    def __init__(self, value): self.value, self.__private = 0, value
class Env:
    # The count itself is kept where no state is read, so that only the line under test shows it.
    n = property(lambda self: self.clock, lambda self, value: setattr(self, "clock", value))
    def reset(self, seed=None):
        self.n = 0
        self.keep()
        return 0, {}
    def keep(self):
        LINE
    def step(self, action):
        self.n += 1
        self.keep()
        return 0, 0.0, self.n % 7 == 0, False, {}
"""


@pytest.mark.parametrize("line", STATES.values(), ids=STATES)
def test_whatever_an_environment_keeps_its_state_comes_again(program, run, line):
    made = program(env=STATE_ENV.replace("LINE", line), agent=_ZERO)
    one = run(made, max_steps=20)
    comes_again(made, one)
    states = [decode(s.fact)[STEP_FIELDS.index("state_hash")] for s in one.stepped[:6]]
    assert len(set(states)) == 6


_ZERO = (
    "class Agent:\n    def __init__(self, c): pass\n    def step(self, o): return {'action': 0}\n"
)


def test_the_state_of_slots_counts(program, run):
    env = STATE_ENV.replace("class Env:\n", "class Env:\n    __slots__ = ('clock', 'hidden')\n")
    hidden = env.replace("LINE", "self.hidden = self.n")
    other = env.replace("LINE", "self.hidden = self.n * 2")
    assert run(program(_ZERO, hidden)).ended.chain != run(program(_ZERO, other)).ended.chain


def test_an_environments_own_state_hash_is_used(program, run):
    env = STATE_ENV.replace("LINE", "self.x = (n for n in [1])")
    assert run(program(_ZERO, env)).ended.code == "env_invalid"
    env += "    def state_hash(self): return str(self.n)\n"
    made = program(_ZERO, env)
    comes_again(made, run(made))


def test_a_state_has_no_addresses_in_it(program):
    """Equal sessions side by side: their objects lie elsewhere, their states are equal."""
    for line in STATES.values():
        made = program(env=STATE_ENV.replace("LINE", line), agent=_ZERO)
        machines = [SessionMachine(made, SessionConfig(1, 9)) for _ in range(3)]
        assert len({m.start().reset for m in machines}) == 1
        assert len({m.step().fact for m in machines}) == 1, line
