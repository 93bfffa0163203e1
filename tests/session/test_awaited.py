"""`await self.call(...)`: a decision that stands still while a tool is called."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.session.shuffled import run_shuffled

from dsec.replay.verify import verify
from dsec.reward.score import EnvScorer
from dsec.session.documents import AgentDocument, EnvDocument, ToolUse
from dsec.session.io import SessionConfig
from dsec.session.local import local_program, run_in_memory
from dsec.session.machine import SessionMachine
from dsec.session.memory_log import Failed
from dsec.session.recorded import Recorded
from dsec.session.rerun import rerun, undelivered

MODEL = ToolUse(ref="a" * 64, name="model", deadline_s=30.0)
LATER = ToolUse(ref="b" * 64, name="later", deadline_s=30.0, blocking=False)
CONFIG = SessionConfig(11, 8)
AGENT = """
class Agent:
    def __init__(self, config):
        self.space, self.n, self.told = config["action_space"], 0, 0
    async def step(self, observation):
        self.n += 1
        drawn = self.space.sample()
        for turn in range(self.n % 3):
            answer = await self.call("model", {"prompt": self.n, "turn": turn})
            self.told += len(repr(answer))
        return {"action": (drawn + self.told) % 2}
    def on_tool_result(self, tool_id, result):
        raise AssertionError("what is awaited is told there alone")
    def on_reward(self, reward, done, info):
        self.told += 1
"""


def program_of(agent: str = AGENT, tools: tuple[ToolUse, ...] = (MODEL,), **options: Any):
    return local_program(
        AgentDocument(entry="agent.py:Agent", tools=list(tools), **options),
        {"agent.py": agent.encode()},
        EnvDocument(entry="gymnasium:CartPole-v1"),
        {},
    )


def call_tool(call) -> Any:
    if '"turn": 1' in call.arguments:
        return Failed("deadline", "too slow")
    return {"text": call.arguments * 2}


@pytest.mark.parametrize("base", [False, True])
def test_a_restart_at_any_row_is_given_the_recorded_results(base, session_id):
    agent = AGENT
    if base:
        agent = "import dsec\n" + AGENT.replace("class Agent:", "class Agent(dsec.Agent):")
    program = program_of(agent)
    rows = run_in_memory(program, CONFIG, session_id, EnvScorer(), call_tool=call_tool)
    recorded = Recorded.from_rows(rows)
    assert (recorded.ended.status, len(recorded.steps)) == ("completed", 8)
    assert len(recorded.turns) == sum(n % 3 for n in range(1, 9))
    assert verify(rows, program, CONFIG, EnvScorer()).ok
    known = {(one.kind, one.ordinal): one for one in recorded.inputs}
    for cut in range(len(rows) + 1):
        part = Recorded.from_rows(rows[:cut])
        machine = SessionMachine(program, CONFIG)
        assert rerun(machine, part) is None, cut
        if part.reset is None:
            machine.start()
        for one in undelivered(part, machine):
            machine.deliver(one)
        while machine.ended is None:
            if machine.awaiting is None:
                machine.step()
            else:
                for one in known.values():
                    machine.deliver(one)
        assert machine.ended == recorded.ended, cut
        machine.close()


def test_with_lag_steps_it_does_not_matter_what_comes_late(session_id):
    program, asked = program_of(), SessionConfig(11, 8, lag_steps=2)
    chains = set()
    for seed in range(6):
        rows = run_shuffled(
            program, asked, session_id, EnvScorer(), random.Random(seed), call_tool=call_tool
        )
        assert verify(rows, program, asked, EnvScorer()).ok
        chains.add(Recorded.from_rows(rows).ended.chain)
    assert len(chains) == 1


@pytest.mark.parametrize(
    ("awaited", "tools", "told"),
    [
        ("asyncio.sleep(0)", (MODEL,), "something other than the session's own calls"),
        ("self.call('other')", (MODEL,), "no tool is called 'other'"),
        ("self.call('later')", (LATER,), "declared with blocking: false"),
        ("dsec.Agent.call('model')", (), "declares no `tools`"),
    ],
)
def test_what_cannot_be_awaited_ends_the_session(awaited, tools, told):
    agent = f"""
import asyncio, dsec
class Agent:
    def __init__(self, config): pass
    def on_tool_result(self, tool_id, result): pass
    async def step(self, observation):
        try:
            await {awaited}
        finally:
            self.closed = True
"""
    machine = SessionMachine(program_of(agent, tools), CONFIG)
    machine.start()
    agent = machine._agent
    ended = machine.step()
    assert ended.code == "agent_invalid"
    assert told in ended.message
    machine.close()
    assert agent.closed


def test_calls_have_the_limit_of_tool_turns(session_id):
    program = program_of(AGENT.replace("self.n % 3", "9"), tool_turns_max=4)
    rows = run_in_memory(program, CONFIG, session_id, EnvScorer(), call_tool=call_tool)
    assert Recorded.from_rows(rows).ended.code == "tool_turns_max"
    assert verify(rows, program, CONFIG, EnvScorer()).ok
