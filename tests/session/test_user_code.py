"""User code that raises or returns nonsense ends its own session, with a code and its own line."""

import pytest

from dsec.session.io import SessionConfig
from dsec.session.machine import SessionMachine
from dsec.session.program import ProgramError
from dsec.session.recorded import Recorded, RecordedStep
from dsec.session.rerun import rerun

AGENT = """
class Agent:
    def __init__(self, config):
        pass  # init
    def on_episode_start(self, episode):
        pass  # begin
    def step(self, observation):
        return {"action": 0}  # step
    def on_reward(self, reward, done, info):
        pass  # reward
    def on_reward_missing(self, step, code):
        pass  # missing
    def on_policy(self, version, state):
        pass  # policy
"""
ENV = """
class Env:
    def __init__(self):
        pass  # init
    def reset(self, seed=None):
        return 0, {}  # reset
    def step(self, action):
        return 0, 1.0, False, False, {}  # step
"""
RAISES = ("raise ValueError('the culprit')", "import sys; sys.exit(3)", "raise KeyboardInterrupt")


def put(source, place, line):
    lines = source.splitlines()
    [n] = [n for n, text in enumerate(lines) if text.endswith(f"# {place}")]
    indent = lines[n][: len(lines[n]) - len(lines[n].lstrip())]
    lines[n] = indent + line
    return "\n".join(lines)


def verify_failure(program, one, code, steps):
    """The end is right, and a re-execution comes to the same."""
    assert (one.ended.status, one.ended.code, one.ended.steps) == ("failed", code, steps)
    assert len(one.stepped) == steps
    started = one.started
    recorded = Recorded(
        started.reset if started else None,
        started.chain if started else None,
        [RecordedStep(s.step, s.fact, s.chain) for s in one.stepped],
        one.inputs,
        one.ended,
    )
    assert rerun(SessionMachine(program, one.machine.config), recorded) is None


@pytest.mark.parametrize("line", RAISES)
@pytest.mark.parametrize("place", ["init", "begin", "step", "reward", "policy"])
def test_an_agent_that_raises(program, run, place, line):
    made = program(put(AGENT, place, line), ENV)
    one = run(made, policy_version="p@1")
    verify_failure(made, one, "agent_raised", 1 if place == "reward" else 0)
    assert line in one.ended.message
    assert "agent.py" in one.ended.message


@pytest.mark.parametrize("line", RAISES)
@pytest.mark.parametrize("place", ["init", "reset", "step"])
def test_an_environment_that_raises(program, run, place, line):
    made = program(AGENT, put(ENV, place, line))
    one = run(made)
    verify_failure(made, one, "env_raised", 0)
    assert line in one.ended.message


@pytest.mark.parametrize(
    "line",
    [
        "return None",
        "return 3",
        "return {}",
        "return {'actions': 0}",
        "return {'action': 0, 'mine': 1}",
        "return {'action': 0, 'tool_calls': [{}]}",
        "return {'tool_calls': [{}]}",
        "return {'action': object()}",
        "return {'action': lambda: 0}",
        "return {'action': 0, 'extras': object()}",
        "return {'action': 0, 1: 2}",
        "import numpy; return {'action': 0, 'tool_calls': numpy.ones(3)}",
        "return (x for x in [])",
        "a = []; a.append(a); return {'action': a}",
    ],
)
def test_an_agent_that_returns_nonsense(program, run, line):
    made = program(put(AGENT, "step", line), ENV)
    one = run(made)
    verify_failure(made, one, "agent_invalid", 0)
    assert one.ended.message


def test_values_that_run_code_when_they_are_read(program, run):
    hostile = """
import collections.abc
class Hostile(collections.abc.Mapping):
    def __getitem__(self, key): raise RuntimeError("hostile")
    def __iter__(self): raise RuntimeError("hostile")
    def __len__(self): return 1
class Odd(dict):
    def __iter__(self): raise RuntimeError("hostile")
    def __contains__(self, key): raise RuntimeError("hostile")
    def keys(self): raise RuntimeError("hostile")
class Repr:
    def __repr__(self): raise RuntimeError("hostile")
    def __hash__(self): return 1
    def __float__(self): raise Exc(self)
class Exc(Exception):
    def __str__(self): raise RuntimeError("hostile")
"""
    for line in (
        "return {'action': Hostile()}",
        "return {'action': 0, Repr(): 1}",
        "return {'action': 0, 'extras': Hostile()}",
    ):
        one = run(program(hostile + put(AGENT, "step", line), ENV))
        assert (one.ended.code, one.ended.steps) == ("agent_invalid", 0), line
    one = run(program(hostile + put(AGENT, "step", "return Odd(action=0)"), ENV))
    assert one.ended.code in ("max_steps", "agent_invalid")
    for line in (
        "return Hostile(), 1.0, False, False, {}",
        "return 0, Repr(), False, False, {}",
        "return 0, 1.0, Hostile, 1, {1: Hostile()}",
    ):
        one = run(program(AGENT, hostile + put(ENV, "step", line)))
        assert (one.ended.code, one.ended.steps) == ("env_invalid", 0), line


@pytest.mark.parametrize(
    "line",
    [
        "return None",
        "return 0, 1.0, False, {}",
        "return 0, 'much', False, False, {}",
        "return 0, None, False, False, {}",
        "return 0, 1.0, False, False, None",
        "return 0, 1.0, False, False, [1]",
        "return object(), 1.0, False, False, {}",
        "return 0, 1.0, False, False, {'x': object()}",
        "import numpy; return 0, 1.0, numpy.zeros(2), False, {}",
    ],
)
def test_a_step_that_returns_nonsense(program, run, line):
    made = program(AGENT, put(ENV, "step", line))
    one = run(made)
    verify_failure(made, one, "env_invalid", 0)
    assert one.ended.message


@pytest.mark.parametrize(
    "line", ["return 0", "return 0, None", "return [0, {}]", "return object(), {}", "return 0, {1}"]
)
def test_a_reset_that_returns_nonsense(program, run, line):
    made = program(AGENT, put(ENV, "reset", line))
    one = run(made)
    verify_failure(made, one, "env_invalid", 0)
    assert one.started is None


def test_an_environment_without_step_and_one_whose_state_cannot_be_read(program, run):
    no_step = "class Env:\n    def reset(self, seed=None): return 0, {}\n"
    assert run(program(AGENT, no_step)).ended.code == "env_invalid"
    opaque = put(ENV, "init", "import itertools; self.made = (x for x in [1])")
    ended = run(program(AGENT, opaque)).ended
    assert ended.code == "env_invalid"
    assert "Env.made" in ended.message


def test_a_row_that_is_too_large_is_refused(program, run):
    one = run(program(AGENT, put(ENV, "step", "return 0, 1.0, 0, 0, {'x': b'x' * 500_000}")))
    assert (one.ended.code, one.ended.steps) == ("too_large", 0)


def test_awaiting_the_outside_world_is_refused(program, run):
    agent = AGENT.replace("def step", "async def step")
    agent = put(agent, "step", "import asyncio; await asyncio.sleep(0)")
    assert run(program(agent, ENV)).ended.code == "agent_invalid"


def test_out_of_memory_is_not_the_sessions_alone(program):
    made = program(put(AGENT, "step", "raise MemoryError"), ENV)
    machine = SessionMachine(made, SessionConfig(1, 5))
    machine.start()
    with pytest.raises(MemoryError):
        machine.step()


def test_hooks_are_optional_and_a_hook_that_cannot_be_looked_up_ends_the_session(program, run):
    bare = (
        "class Agent:\n    def __init__(self, c): pass\n    def step(self, o): return {'action': 0}"
    )
    assert run(program(bare + "\n", ENV)).ended.code == "max_steps"
    odd = bare + "    @property\n    def on_reward(self): raise ValueError('odd')\n"
    assert run(program(odd, ENV)).ended.code == "agent_raised"


def test_close_keeps_what_it_raises_to_itself(program, run):
    one = run(program(AGENT, ENV + "    def close(self): raise SystemExit(1)\n"))
    one.machine.close()
    assert one.ended.code == "max_steps"


SLY = """
class Sly(dict):
    def __bool__(self):
        raise ValueError("asked")
class ndarray:
    dtype, shape = "<f4", (4,)
    def tobytes(self):
        return 7
"""


def test_an_info_that_is_asked_nothing(program, run):
    source = SLY + put(ENV, "step", "return 0, 1.0, False, False, Sly(a=1)")
    one = run(program(AGENT, source), max_steps=3)
    assert (one.ended.status, one.ended.steps) == ("completed", 3)


def test_an_observation_that_says_it_is_an_array(program, run):
    source = SLY + put(ENV, "step", "return ndarray(), 1.0, False, False, {}")
    one = run(program(AGENT, source))
    assert (one.ended.status, one.ended.code) == ("failed", "env_invalid")


# -- exceptions of ours, raised by user code -------------------------------------------------------

OURS = (
    "from dsec.session.adapters.gymnasium import EnvError as E; raise E('lost', 'the culprit')",
    "from dsec.session.stops import Stop as E; raise E('max_steps', 'the culprit')",
    "from dsec.session.adapters.readable import StateError as E; raise E('the culprit')",
    "from dsec.session.tools import CallsTooLarge as E; raise E('the culprit')",
    "from dsec.session.anchors import NotCaptured as E; raise E('the culprit')",
    "from dsec.session.anchor_restore import NotRestorable as E; raise E('the culprit')",
    "from dsec.session.code_errors import CodeError as E; raise E('bad', 'x', 'the culprit')",
    "from dsec.session.program import ProgramError as E; raise E('bad', 'x', 'the culprit')",
    "from dsec.session.log_row import RecordedGap as E; raise E('the culprit')",
    "from dsec_contracts.canonical import CanonicalError as E; raise E('the culprit')",
    # By calling us: ours raised it, and it came through user code all the same.
    "from dsec.session.adapters.gymnasium import GymnasiumAdapter as A; A('the culprit')",
    "raise StopIteration('the culprit')",
    "raise GeneratorExit('the culprit')",
)


@pytest.mark.parametrize("line", OURS)
@pytest.mark.parametrize("place", ["init", "begin", "step", "reward", "policy"])
def test_an_agent_that_raises_what_is_ours(program, run, place, line):
    made = program(put(AGENT, place, line), ENV)
    one = run(made, policy_version="p@1")
    verify_failure(made, one, "agent_raised", 1 if place == "reward" else 0)
    assert "the culprit" in one.ended.message
    assert "agent.py" in one.ended.message


@pytest.mark.parametrize("line", OURS)
@pytest.mark.parametrize("place", ["init", "reset", "step", "hash"])
def test_an_environment_that_raises_what_is_ours(program, run, place, line):
    env = ENV + "    def state_hash(self):\n        return b''  # hash\n"
    made = program(AGENT, put(env, place, line))
    one = run(made)
    verify_failure(made, one, "env_raised", 0)
    assert "the culprit" in one.ended.message


@pytest.mark.parametrize("line", OURS)
def test_values_that_raise_what_is_ours_when_they_are_read(program, run, line):
    hostile = f"""
import collections.abc
class Hostile(collections.abc.Mapping):
    def __getitem__(self, key): {line}
    def __iter__(self): {line}
    def __len__(self): return 1
class Calls(dict):
    def keys(self): {line}
    def __iter__(self): {line}
"""
    for given in ("{'action': Hostile()}", "{'action': 0, 'extras': Hostile()}"):
        one = run(program(hostile + put(AGENT, "step", f"return {given}"), ENV))
        assert (one.ended.code, one.ended.steps) == ("agent_invalid", 0), given
    one = run(program(AGENT, hostile + put(ENV, "step", "return Hostile(), 1.0, False, False, {}")))
    assert (one.ended.code, one.ended.steps) == ("env_invalid", 0)
    one = run(program(AGENT, hostile + put(ENV, "step", "return 0, 1.0, False, False, Calls(a=1)")))
    assert one.ended.code in ("env_invalid", "max_steps")


@pytest.mark.parametrize("line", OURS)
def test_code_that_raises_what_is_ours_when_it_is_loaded(program, line):
    for agent, env, code in ((f"{line}\n", ENV, "agent"), (AGENT, f"{line}\n", "env")):
        with pytest.raises(ProgramError) as failed:
            program(agent, env)
        assert failed.value.code == f"{code}_load_failed"
        assert "the culprit" in str(failed.value)


@pytest.mark.parametrize("line", ["raise KeyError('odd')", "raise SystemExit(3)", OURS[6]])
def test_a_class_that_raises_when_it_is_asked_for_step(program, line):
    asked = f"class Meta(type):\n    def __getattr__(self, name): {line}\n"
    with pytest.raises(ProgramError) as failed:
        program(asked + "class Agent(metaclass=Meta): pass\n", ENV)
    assert failed.value.code == "agent_load_failed"


UNTELLABLE = """
class Untellable({base}):
    def __init__(self, *args): pass
    def __str__(self): raise SystemExit("told")
    @property
    def __notes__(self): raise SystemExit("told")
    @property
    def __cause__(self): raise SystemExit("told")
    @property
    def __class__(self): raise SystemExit("told")
    @property
    def __traceback__(self): raise SystemExit("told")
    @property
    def code(self): raise SystemExit("told")
"""


@pytest.mark.parametrize(
    "base",
    [
        "Exception",
        "BaseException",
        "__import__('dsec.session.stops', fromlist=['x']).Stop",
        "__import__('dsec.session.adapters.gymnasium', fromlist=['x']).EnvError",
    ],
)
def test_an_error_that_cannot_be_told(program, run, base):
    source = UNTELLABLE.format(base=base)
    for place in ("init", "begin", "step", "reward"):
        one = run(program(source + put(AGENT, place, "raise Untellable()"), ENV))
        assert (one.ended.status, one.ended.code) == ("failed", "agent_raised")
        assert "Untellable" in one.ended.message
    for place in ("init", "reset", "step"):
        one = run(program(AGENT, source + put(ENV, place, "raise Untellable()")))
        assert (one.ended.status, one.ended.code) == ("failed", "env_raised")
    with pytest.raises(ProgramError, match="which raises when it is told"):
        program(source + "raise Untellable()\n", ENV)


def test_values_that_say_they_are_something_else(program, run):
    liar = """
class Meta(type):
    @property
    def __name__(cls): raise SystemExit("asked")
class Liar(metaclass=Meta):
    @property
    def __class__(self): raise SystemExit("asked")
"""
    one = run(program(liar + put(AGENT, "step", "return Liar()"), ENV))
    assert (one.ended.code, one.ended.steps) == ("agent_invalid", 0)
    for line in ("return 0, 1.0, False, False, Liar()", "return Liar()"):
        one = run(program(AGENT, liar + put(ENV, "step", line)))
        assert (one.ended.code, one.ended.steps) == ("env_invalid", 0), line
