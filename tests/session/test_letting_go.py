"""What a closed session lets go of: its user code's objects end with it, not at some other time."""

import gc
import sys
import types

import pytest

AGENT = """
import ended
class Agent:
    def __init__(self, config):
        self.space = config["action_space"]
    def step(self, observation):
        return {"action": 0}
    def on_reward(self, reward, done, info):
        pass
    def __del__(self):
        ended.names.append("agent")
"""
ENV = """
import ended
class Env:
    def reset(self, seed=None):
        return 0, {"part": [1]}
    def step(self, action):
        return 0, 1.0, False, False, {"part": [1]}
    def close(self):
        pass  # close
    def __del__(self):
        ended.names.append("env")
"""


ENDED = types.ModuleType("ended")
ENDED.names = []


@pytest.fixture
def names(monkeypatch):
    """Who was finalized, in order. The collector rests: only what nobody refers to goes. One list
    for all: user code that is loaded keeps the one that it imported."""
    monkeypatch.setitem(sys.modules, "ended", ENDED)
    ENDED.names.clear()
    gc.disable()
    yield ENDED.names
    gc.enable()


@pytest.mark.parametrize("close", ["pass", "raise ValueError('mine')"])
def test_agent_and_environment_are_finalized_by_close(program, run, names, close):
    one = run(program(AGENT, ENV.replace("pass  # close", close)), max_steps=3)
    assert (one.ended.status, names) == ("completed", [])
    one.machine.close()
    assert sorted(names) == ["agent", "env"]
    one.machine.close()  # again is nothing
    assert len(names) == 2


def test_of_a_failed_session_the_agent_at_once(program, run, names):
    one = run(program(AGENT.replace('{"action": 0}', "1 / 0"), ENV), max_steps=3)
    assert (one.ended.status, names) == ("failed", ["agent"])
    one.machine.close()
    assert names == ["agent", "env"]
