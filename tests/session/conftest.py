"""Programs from a few lines of source, and the sessions that run them in this process."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from dsec.session.documents import AgentDocument, EnvDocument
from dsec.session.io import Ended, Input, SessionConfig, Started, Stepped, reward_input
from dsec.session.local import local_program
from dsec.session.machine import SessionMachine
from dsec.session.program import Program
from dsec_contracts.canonical import encode

SAMPLING_AGENT = """
class Agent:
    def __init__(self, config):
        self.space = config["action_space"]
    def step(self, observation):
        return {"action": self.space.sample()}
"""


def make_program(agent: str = SAMPLING_AGENT, env: str = "gymnasium:CartPole-v1", **options: Any):
    """`env`: an entry, or source that defines `Env`. Options go into the documents."""
    in_agent = {k: v for k, v in options.items() if k in AgentDocument.model_fields}
    env_only = EnvDocument.model_fields.keys() - AgentDocument.model_fields.keys()
    in_env = {k: v for k, v in options.items() if k in env_only}
    files = {}
    if "\n" in env:
        files, env = {"env.py": textwrap.dedent(env).encode()}, "env.py:Env"
    return local_program(
        AgentDocument(entry="agent.py:Agent", **in_agent),
        {"agent.py": textwrap.dedent(agent).encode()},
        EnvDocument(entry=env, **in_env),
        files,
    )


def reward_of(stepped: Stepped, value: float | None = None) -> Input:
    """A reward as the reward service makes it."""
    value = stepped.env_reward if value is None else value
    cause = stepped.chain[:16]
    fact = encode([stepped.step, 1, value, {"env": [value, 1.0]}, cause])
    return reward_input(stepped.step, value, fact, cause)


class Run:
    """One session driven to its end, with all that it gave."""

    def __init__(self, program: Program, config: SessionConfig, steps: int | None = None) -> None:
        self.machine = SessionMachine(program, config)
        self.started: Started | None = None
        self.stepped: list[Stepped] = []
        self.inputs: list[Input] = []
        output = self.machine.start()
        if isinstance(output, Started):
            self.started = output
            while self.machine.ended is None and (steps is None or len(self.stepped) < steps):
                self.step()

    def step(self) -> None:
        """One step and its reward."""
        output = self.machine.step()
        if isinstance(output, Stepped):
            self.stepped.append(output)
            self.inputs.append(reward_of(output))
            self.machine.deliver(self.inputs[-1])

    @property
    def ended(self) -> Ended:
        """How it ended."""
        assert self.machine.ended is not None
        return self.machine.ended


@pytest.fixture(scope="session")
def session_id() -> UUID:
    """Some session's id."""
    return UUID("0192f0c1-2345-7abc-8def-0123456789ab")


@pytest.fixture
def program() -> Callable[..., Program]:
    """See `make_program`."""
    return make_program


@pytest.fixture
def run() -> Callable[..., Run]:
    """Run a program to its end: `run(program, seed=7, max_steps=20)`."""

    def start(program: Program, seed: int = 7, steps: int | None = None, **config: Any) -> Run:
        config.setdefault("max_steps", 20)
        config.setdefault("episodes_max", program.env.episodes_max)
        return Run(program, SessionConfig(seed=seed, **config), steps)

    return start
