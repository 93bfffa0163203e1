"""The sessions of the chaos run, as the files that a user would write: nine cases.

Five environments with rewards and blocking tools that are answered at once, and four cases of a
world that answers late: rewards that ask a service, and tools that do not block, each with
`lag_steps` and without. With it, everything that the agent hears has its fixed place, and the agent
acts by it. Without it, what comes when is the clock's: the run has a chain of its own, so there the
agent acts by its seed alone, and what can be compared is the reward of each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rig import write_session

SERVICE = "market"
LAG_STEPS = 4
REWARD_LAG_STEPS_MAX = 8

AGENT = '''
import random


class Agent:
    """Its next action depends on everything that it was told so far, unless it is deaf."""

    def __init__(self, session_config):
        self.space = session_config["action_space"]
        self.params = session_config["params"]
        self.total = 0.0
        self.turns = 0
        self.tools = bool(session_config["tools"])
        self.asked = False

    def step(self, observation):
        self.turns += 1
        beside = self.params.get("beside", False)
        if self.tools and not beside and not self.asked:
            self.asked = True
            return {"tool_calls": self.calls()}
        self.asked = False
        action = self.space.sample()
        if random.random() + 0.01 * (self.heard() % 1) > 0.5:
            action = self.space.sample()
        decided = {"action": action}
        if beside:
            decided["tool_calls"] = self.calls()
        return decided

    def heard(self):
        return 0.0 if self.params.get("deaf", False) else self.total

    def calls(self):
        arguments = {"x": round(self.heard(), 3) + self.turns % 3}
        return [{"name": "lookup", "arguments": arguments}] * (1 + self.turns % 2)

    def on_reward(self, reward, done, info):
        self.total += reward

    def on_tool_result(self, tool_id, result):
        self.total = 0.5 * self.total + result["y"]

    def get_state(self):
        return {"total": self.total, "asked": self.asked, "turns": self.turns}

    def set_state(self, state):
        self.total, self.asked, self.turns = state["total"], state["asked"], state["turns"]
'''
REWARD = """
import dsec


@dsec.reward(weights={"env": 1.0, "length": 0.125})
def shaped(t, services):
    return {"env": float(t.env_reward), "length": 1.0 / (1 + t.step)}
"""
ASKING = f"""
import dsec


@dsec.reward(weights={{"env": 1.0, "worth": 0.5}}, services=["{SERVICE}"])
async def asking(t, services):
    question = {{"step": t.step, "action": int(t.action)}}
    found = await services["{SERVICE}"].get("/worth", params=question)
    return {{"env": float(t.env_reward), "worth": found.json()["worth"]}}
"""
TOOL = """
import time


def lookup(x):
    time.sleep((int(x * 1000) % 7) / 200)
    return {"y": (x * 7 + 1) % 5}
"""
TOOL_SPEC = """\
name: lookup
entry: tools.py:lookup
code: [tools.py]
parameters: {type: object, properties: {x: {type: number}}, required: [x]}
idempotent: true
"""
BLOCKING = "tools: [{ref: lookup}]\n"
BESIDE = "tools: [{ref: lookup, blocking: false}]\n"


@dataclass(frozen=True)
class Case:
    """One kind of session."""

    environment: str
    reward: str = "reward.py:shaped"
    tools: str = ""
    params: str = ""
    lag_steps: int | None = None
    reward_lag_steps_max: int | None = None
    share_of_steps: float = 1.0
    """Of the run's `--max-steps`: calls take their time, so that all cases end at about the same
    time."""

    @property
    def repeatable(self) -> bool:
        """Whether nothing reaches it at a place that the clock decides: property (c)."""
        return self.reward_lag_steps_max is None


CASES = (
    Case("CartPole-v1", tools=BLOCKING, share_of_steps=0.25),
    Case("FrozenLake-v1", "env"),
    Case("Pendulum-v1"),
    Case("Taxi-v4", "env"),
    Case("Acrobot-v1"),
    Case("FrozenLake-v1", "reward.py:asking", lag_steps=LAG_STEPS),
    Case(
        "CartPole-v1",
        "reward.py:asking",
        params="deaf: true",
        reward_lag_steps_max=REWARD_LAG_STEPS_MAX,
    ),
    Case(
        "Taxi-v4",
        "reward.py:asking",
        tools=BESIDE,
        params="beside: true",
        lag_steps=LAG_STEPS,
        share_of_steps=0.25,
    ),
    Case(
        "CartPole-v1",
        tools=BESIDE,
        params="beside: true, deaf: true",
        reward_lag_steps_max=REWARD_LAG_STEPS_MAX,
        share_of_steps=0.25,
    ),
)


def write_mix(directory: Path, max_steps: int) -> Iterator[Path]:
    """One session.yaml for each case."""
    for n, case in enumerate(CASES):
        files = {
            "agent.py": AGENT,
            "reward.py": REWARD if case.reward != "reward.py:asking" else ASKING,
            "tools.py": TOOL,
            "lookup.yaml": TOOL_SPEC,
            "agent_spec.yaml": "entry: agent.py:Agent\ncode: [agent.py]\n"
            f"anchors: {{every_steps: 10}}\nparams: {{{case.params}}}\n{case.tools}",
            "env_spec.yaml": f"entry: gymnasium:{case.environment}\n",
        }
        lags = {"lag_steps": case.lag_steps, "reward_lag_steps_max": case.reward_lag_steps_max}
        keys = {name: str(steps) for name, steps in lags.items() if steps is not None}
        steps = int(max_steps * case.share_of_steps)
        yield write_session(directory / f"case{n}", steps, files, reward=case.reward, **keys)
