"""What the sessions of a simulation run: a small environment, agents that listen, rewards, tools.

An agent's actions depend on every reward and tool result that it heard, so that one that is lost,
doubled, changed or out of its place shows in the chain hash.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

from tests.simulation import market

from dsec.env_runtime import library
from dsec.platform.virtual import undeclared_uses
from dsec.reward.reexecution import Asks, Known, answered, recorded
from dsec.reward.score import Score, Scorer, load_scorer
from dsec.reward.services import Response
from dsec.session.documents import (
    AgentDocument,
    EnvDocument,
    RewardDocument,
    ToolDocument,
    ToolUse,
    seal,
)
from dsec.session.io import Call
from dsec.session.local import run_in_memory
from dsec.session.log_row import LogRow
from dsec.session.program import Program, load_program, session_config
from dsec.tool.call import Tool, load
from dsec.tool.frames import Order
from dsec_contracts.canonical import decode
from dsec_contracts.session import RequestFact

ENV = b"""
import gymnasium
import numpy as np

class Env(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(5)
    observation_space = gymnasium.spaces.Box(0, 100, (2,), np.int64)

    def _seen(self):
        return np.array([self.x, self.n], np.int64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        level = 0 if options is None else options["curriculum_level"]
        self.x, self.n = (int(self.np_random.integers(97)) + 11 * level) % 97, 0
        return self._seen(), {}

    def step(self, action):
        self.x = (3 * self.x + int(action) + int(self.np_random.integers(5))) % 97
        self.n += 1
        return self._seen(), self.x / 7, self.x % 5 == 0, self.n == 4, {}
"""
AGENT = b"""
class Agent:
    def __init__(self, config):
        self.told, self.seen, self.turns = 0, 0, 0
        self.tools = [tool["name"] for tool in config["tools"]]
        self.beside = config["params"].get("beside", False)

    def step(self, observation):
        self.turns += 1
        self.seen = (3 * self.seen + int(observation[0])) % 1009
        if self.tools and self.turns % 2:
            calls = [{"name": name, "arguments": {"x": self.told % 11}} for name in self.tools]
            return {"tool_calls": calls}
        decided = {"action": (self.seen + self.told) % 5}
        if self.beside and self.turns % 4:
            calls = [{"name": name, "arguments": {"x": self.turns}} for name in self.tools]
            decided["tool_calls"] = calls
        return decided

    def on_reward(self, reward, done, info):
        self.told = (self.told * 7 + int(reward * 100)) % 1009

    def on_reward_missing(self, step, code):
        self.told = (self.told * 7 + 1) % 1009

    def on_tool_result(self, tool_id, result):
        self.told = (self.told * 7 + (result if isinstance(result, int) else 3)) % 1009
"""
REWARD = b"""
def score(t, services):
    return {"far": float(t.next_observation[0] - t.observation[0]), "bold": t.action / 3}
"""
ASKING = b"""
async def score(t, services):
    found = await services["market"].get("/worth", params={"step": t.step, "action": t.action})
    return {"far": float(t.next_observation[0] - t.observation[0]), "worth": found.json()["worth"]}
"""
LOOKUP = b"""
def tool(x):
    return 17 * x + 1
"""
ONCE = b"""
made = []
def tool(x):
    made.append(x)
    return len(made)
"""


def _tool(name: str, code: bytes, *, idempotent: bool) -> tuple[str, bytes]:
    document = ToolDocument(name=name, entry="tool.py:tool", idempotent=idempotent, deadline_s=2.0)
    return seal("tool", document, {"tool.py": code})


def _use(name: str, spec: tuple[str, bytes], *, blocking: bool = True) -> ToolUse:
    return ToolUse(ref=spec[0], name=name, deadline_s=2.0, blocking=blocking)


LOOKUP_SPEC = _tool("lookup", LOOKUP, idempotent=True)
ONCE_SPEC = _tool("once", ONCE, idempotent=False)
ENV_SPEC = seal("env", EnvDocument(entry="env.py:Env"), {"env.py": ENV})
BY_ENV = seal("reward", RewardDocument(), {})
BY_FUNCTION = seal(
    "reward",
    RewardDocument(entry="reward.py:score", weights={"far": 0.5, "bold": 2.0}),
    {"reward.py": REWARD},
)
BY_ASKING = seal(
    "reward",
    RewardDocument(
        entry="reward.py:score", weights={"far": 0.5, "worth": 2.0}, services=[market.NAME]
    ),
    {"reward.py": ASKING},
)


def _agent(**options: Any) -> tuple[str, bytes]:
    document = AgentDocument(entry="agent.py:Agent", **options)
    return seal("agent", document, {"agent.py": AGENT})


_LATE_TOOLS = {
    "tools": [
        _use("lookup", LOOKUP_SPEC, blocking=False),
        _use("once_more", LOOKUP_SPEC),
        _use("again", LOOKUP_SPEC, blocking=False),
    ],
    "params": {"beside": True},
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of session."""

    name: str
    agent: tuple[str, bytes]
    reward: tuple[str, bytes]
    repeatable: bool = True
    """Whether an undisturbed run gives the same: property (c)."""
    options: tuple[tuple[str, int], ...] = ()
    """What its request says of late inputs and of a curriculum."""


KINDS = (
    Kind("env", _agent(), BY_ENV),
    Kind("scored", _agent(), BY_FUNCTION),
    Kind("tools", _agent(tools=[_use("lookup", LOOKUP_SPEC)]), BY_FUNCTION),
    Kind("once", _agent(tools=[_use("once", ONCE_SPEC)]), BY_ENV, repeatable=False),
    Kind("forgetful", _agent(deterministic_mode=False), BY_FUNCTION, repeatable=False),
    Kind(
        "deferred",
        _agent(),
        BY_ASKING,
        repeatable=False,
        options=(("reward_lag_steps_max", 3), ("curriculum_level", 1)),
    ),
    Kind("lagged", _agent(), BY_ASKING, options=(("lag_steps", 2),)),
    Kind(
        "late",
        _agent(**_LATE_TOOLS),
        BY_ASKING,
        repeatable=False,
        options=(("reward_lag_steps_max", 2), ("curriculum_level", 0)),
    ),
    Kind("lagged tools", _agent(**_LATE_TOOLS), BY_ASKING, options=(("lag_steps", 3),)),
    Kind("asking", _agent(), BY_ASKING),
)
SPECS: dict[str, tuple[str, bytes]] = {
    spec[0]: (kind, spec[1])
    for kind, spec in (
        ("env", ENV_SPEC),
        ("reward", BY_ENV),
        ("reward", BY_FUNCTION),
        ("reward", BY_ASKING),
        ("tool", LOOKUP_SPEC),
        ("tool", ONCE_SPEC),
        *(("agent", kind.agent) for kind in KINDS),
    )
}
"""Kind and content of every spec, by its hash."""


def program(kind: Kind) -> Program:
    """The loaded program of a kind of session."""
    return loaded(*kind.agent, *ENV_SPEC)


loaded = cache(load_program)
"""Loading keeps nothing of a session, and costs more than running one."""


_KEPT = {"load_program": loaded, "undeclared_uses": cache(undeclared_uses)}
"""By their names in env-runtime's library."""


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Workers take programs that were loaded once: only sessions are made anew, not code."""
    before = {name: getattr(library, name) for name in _KEPT}
    try:
        for name, once in _KEPT.items():
            setattr(library, name, once)
        yield
    finally:
        for name, real in before.items():
            setattr(library, name, real)


@cache
def scorer(kind: Kind) -> Scorer:
    """What rewards a kind of session."""
    return load_scorer(*kind.reward)


@cache
def _lookup() -> Tool:
    found = load(*LOOKUP_SPEC, {})
    assert isinstance(found, Tool)
    return found


def _call(call: Call) -> Any:
    outcome = _lookup().call(Order(call.arguments, "reference"))
    assert isinstance(outcome, bytes)
    return decode(outcome)


class _Answered:
    """A scorer whose function is told at once what it asks the service."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def score(self, step_fact: bytes, observation: bytes, next_observation: bytes) -> Score:
        known: list[Known] = []
        while True:
            try:
                return self._scorer.score(step_fact, observation, next_observation, recorded(known))
            except Asks as asks:
                told = [market.worth(dict(request.params)) for request in asks.requests]
                heard = [Response(200, {}, json.dumps(one).encode()) for one in told]
                known = answered(asks.requests, heard, known)


_REFERENCE = UUID("019b76da-a800-7000-8000-000000000000")


@cache
def undisturbed(kind: Kind, seed: int, max_steps: int) -> tuple[bytes, tuple[float, ...]]:
    """Last chain hash and rewards of a run in one process that nothing happens to."""
    request = RequestFact(
        session_id=_REFERENCE,
        agent_spec=kind.agent[0],
        env_spec=ENV_SPEC[0],
        reward_fn_hash=kind.reward[0],
        seed=seed,
        max_steps=max_steps,
        creation_timestamp="2026-01-01T00:00:00Z",
        **dict(kind.options),
    )
    code = program(kind)
    config = session_config(request, code)
    rows = run_in_memory(code, config, _REFERENCE, _Answered(scorer(kind)), call_tool=_call)
    return outcome_of(rows)


def outcome_of(rows: list[LogRow]) -> tuple[bytes, tuple[float, ...]]:
    """Last chain hash and rewards, by step, of a log."""
    ended = [bytes(row.chain or b"") for row in rows if row.kind == "session.ended"]
    values = {row.step or 0: row.value or 0.0 for row in rows if row.kind == "reward.scored"}
    return (ended or [b""])[0], tuple(values[step] for step in sorted(values))
