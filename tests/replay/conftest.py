"""Sessions run in memory, and their logs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from dsec.reward.score import EnvScorer, Scorer, load_scorer
from dsec.session.documents import AgentDocument, EnvDocument, RewardDocument, seal
from dsec.session.io import SessionConfig
from dsec.session.local import local_program, run_in_memory
from dsec.session.log_row import LogRow
from dsec.session.program import Program

SESSION_ID = UUID("0192f0c1-2345-7abc-8def-0123456789ab")
AGENT = """
class Agent:
    def __init__(self, config):
        self.space, self.total = config["action_space"], 0.0
    def step(self, observation):
        return {"action": (self.space.sample() + int(self.total)) % 2}
    def on_reward(self, reward, done, info):
        self.total += reward
"""
REWARD = """
def reward(t, services):
    return {"moved": abs(float(t.next_observation[0] - t.observation[0])), "alive": t.env_reward}
"""


class Made:
    """A program and its scorer."""

    def __init__(self, program: Program, scorer: Scorer) -> None:
        self.program = program
        self.scorer = scorer

    def rows(self, seed: int = 7, max_steps: int = 40, **options: Any) -> list[LogRow]:
        """The log of a session."""
        config = SessionConfig(seed, max_steps, episodes_max=self.program.env.episodes_max)
        return run_in_memory(self.program, config, SESSION_ID, self.scorer, **options)


def make(
    agent: str = AGENT, env: str = "gymnasium:CartPole-v1", reward: str = "", **options: Any
) -> Made:
    """A program from sources; `reward` is that of the environment unless source is given."""
    files = {}
    if "\n" in env:
        files, env = {"env.py": textwrap.dedent(env).encode()}, "env.py:Env"
    in_agent = {k: v for k, v in options.items() if k in AgentDocument.model_fields}
    program = local_program(
        AgentDocument(entry="agent.py:Agent", **in_agent),
        {"agent.py": textwrap.dedent(agent).encode()},
        EnvDocument(entry=env, episodes_max=options.get("episodes_max")),
        files,
    )
    if not reward:
        return Made(program, EnvScorer())
    document = RewardDocument(entry="reward.py:reward")
    spec_hash, content = seal("reward", document, {"reward.py": reward.encode()})
    return Made(program, load_scorer(spec_hash, content))


@pytest.fixture(scope="session")
def made() -> Callable[..., Made]:
    """See `make`."""
    return make


@pytest.fixture(scope="session")
def cartpole() -> Made:
    """An agent that hears its rewards, in CartPole, with a reward of two components."""
    return make(reward=REWARD)


@pytest.fixture(scope="session")
def rows(cartpole: Made) -> list[LogRow]:
    """The log of a session of `cartpole`."""
    return cartpole.rows()
