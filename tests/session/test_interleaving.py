"""Many machines in one process: clocks, uuids and generators of one do not reach another."""

import random

import pytest

from dsec.platform import virtual
from dsec.platform.interposition import interposition_of
from dsec.session.io import SessionConfig, Stepped, reward_input
from dsec.session.machine import SessionMachine
from dsec_contracts.canonical import encode

AGENT = """
import datetime, os, random, time, uuid
import numpy as np
class Agent:
    def __init__(self, config):
        self.start = time.time()
        self.fresh = np.random.default_rng()
    def step(self, observation):
        drawn = {
            "random": random.random(), "np": float(np.random.rand()), "time": time.time(),
            "monotonic": time.monotonic(), "now": datetime.datetime.now().isoformat(),
            "uuid": str(uuid.uuid4()), "entropy": os.urandom(4),
            "fresh": float(self.fresh.normal()), "choice": random.choice("abc"), EXTRA
        }
        random.shuffle(list(range(random.randrange(5))))
        return {"action": random.randrange(2), "action_params": drawn}
    def on_reward(self, reward, done, info):
        np.random.seed(info["dsec"]["step"] + 1)
"""
ENV = """
import gymnasium
class Env(gymnasium.Env):
    def __init__(self): self.inner = gymnasium.make("CartPole-v1")
    def reset(self, *, seed=None, options=None): return self.inner.reset(seed=seed)
    def step(self, action): return self.inner.step(action["action"])
"""
SESSIONS, STEPS = 24, 12


@pytest.fixture(autouse=True)
def _virtual():
    virtual.install()
    yield
    virtual.uninstall()


def chains(program, order):
    """The chains of sessions that take turns as `order` says."""
    interposition = interposition_of(*program.namespaces)
    machines = [
        SessionMachine(program, SessionConfig(n // 2, STEPS), interposition)
        for n in range(SESSIONS)
    ]
    for machine in machines:
        machine.start()
    for n in order:
        machine = machines[n]
        if machine.ended is not None:
            continue
        random.random()  # the process's own draws in between reach nobody
        if machine.awaiting is None:
            assert isinstance(machine.step(), Stepped), machine.ended
        else:
            step, cause = machine.awaiting, machine.chain[:16]
            fact = encode([step, 1, 1.0, {"env": [1.0, 1.0]}, cause])
            machine.deliver(reward_input(step, 1.0, fact, cause))
    return [machine.chain for machine in machines]


@pytest.mark.parametrize("torch", [False, True], ids=["plain", "torch"])
def test_interleaved_sessions_equal_lone_ones(program, torch):
    agent = AGENT.replace("EXTRA", '"torch": float(torch.rand(1))' if torch else "")
    if torch:
        pytest.importorskip("torch")
        agent = "import torch\n" + agent
    made = program(agent, ENV)
    turns = 2 * STEPS
    alone = chains(made, [n for n in range(SESSIONS) for _ in range(turns)])
    mixed = [n for n in range(SESSIONS) for _ in range(turns)]
    random.Random(1).shuffle(mixed)
    assert chains(made, mixed) == alone
    assert alone[0::2] == alone[1::2]  # pairs share a seed
    assert len(set(alone)) == SESSIONS // 2
