"""Deferred rewards and tools that do not block, on a server: a lane goes on without them, parks a
session only where it must wait, and a restart anywhere still gets what is outstanding."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.env_runtime.conftest import Row, World, code_of
from tests.env_runtime.test_tools import Tools

from dsec.session.documents import ToolUse
from dsec_contracts import RewardDeferred, SessionEnded, SessionStepped
from dsec_contracts.canonical import decode
from dsec_contracts.reward import RewardNoticeFact
from dsec_contracts.step import STEP_FIELDS

AGENT = """
class Agent:
    def __init__(self, config):
        self.heard = 0
        self.tools = [tool["name"] for tool in config["tools"]]
    def step(self, observation):
        decision = {"action": self.heard % 2}
        if self.tools and int(observation[0]) % 2:
            decision["tool_calls"] = [{"name": name} for name in self.tools]
        return decision
    def on_reward(self, reward, done, info):
        self.heard = (7 * self.heard + info["dsec"]["step"] + int(reward)) % 1009
    def on_tool_result(self, tool_id, result):
        self.heard = (7 * self.heard + len(tool_id)) % 1009
"""
LATE = [
    ToolUse(ref=letter * 64, name=f"tool_{letter}", deadline_s=0.5, blocking=False)
    for letter in "abc"
]


def named(row: Row) -> list[tuple[str, int]]:
    """The inputs that a step names."""
    inputs = decode(row.fact)[STEP_FIELDS.index("inputs")]
    return [(kind, ordinal) for kind, ordinal, _ in inputs]


async def defer(world: World, row: Row, lane: str | None = None) -> None:
    """Say that a step's reward comes later."""
    told: dict[str, Any] = {"session_id": row.session_id, "step": row.step, "code": "service_slow"}
    fact = RewardNoticeFact(**told, cause=row.chain[:16])
    await world.publish(RewardDeferred(fact=fact), lane or row.lane, session_id=row.session_id)


def deferrable(world: World) -> list[str]:
    """What the last tick says of whose rewards may be deferred."""
    ticks = [event for _, event in world.seen if isinstance(event, SessionStepped)]
    return ticks[-1].circumstance.deferrable


async def test_a_session_goes_on_without_deferred_rewards_until_they_would_be_too_old(
    world: World,
) -> None:
    world.record()
    await world.worker(reply_wait_s=1.5)  # what is answered before is not asked for again
    request = await world.run_session(code_of(AGENT), max_steps=4, reward_lag_steps_max=2)
    rows = await world.stepped(request.session_id, 1)
    assert deferrable(world) == [request.session_id.hex]
    await defer(world, rows[0])
    rows = await world.stepped(request.session_id, 2)
    assert named(rows[1]) == [("reward_deferred", 0)]
    await defer(world, rows[1])
    # It waits for the reward of step 0 now, and asks again for what is outstanding.
    again = await world.stepped(request.session_id, 4)
    assert [row.step for row in again[2:4]] == [0, 1]
    assert [row.fact for row in again[2:4]] == [row.fact for row in again[:2]]
    assert world.runs["w1"].worker.roster.seats[request.session_id].waiting_on == "reward"
    await world.reward(rows[0])
    third = await world.until(lambda: [r for r in world.steps(request.session_id) if r.step == 2])
    assert named(third[0]) == [("reward_deferred", 1), ("reward", 0)]
    await world.reward(third[0])
    await world.reward(rows[1])
    fourth = await world.until(lambda: [r for r in world.steps(request.session_id) if r.step == 3])
    await defer(world, fourth[0])
    await asyncio.sleep(0.2)
    assert not world.events(SessionEnded, request.session_id)  # one reward is still to come
    await world.reward(fourth[0])
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.steps) == ("completed", 4)
    verdict = await world.verdict(request)
    assert (verdict.first_divergence, verdict.complete) == (None, True)


async def test_rewards_of_sessions_that_did_not_ask_are_not_deferrable(world: World) -> None:
    world.record()
    world.answering = True
    await world.worker()
    request = await world.run_session(code_of(AGENT), max_steps=2)
    await world.ended(request.session_id)
    assert deferrable(world) == []


@pytest.mark.parametrize("lag", [{"reward_lag_steps_max": 3}, {"lag_steps": 2}])
async def test_a_third_attempt_hears_what_goes_to_the_lane_of_the_first(
    world: World, lag: dict[str, int]
) -> None:
    world.record()
    first = await world.worker()
    request = await world.run_session(code_of(AGENT), max_steps=4, **lag)
    [row, *_] = await world.stepped(request.session_id, 1)
    await defer(world, row)
    rows = await world.stepped(request.session_id, 2)
    await first.close()
    del world.runs["w1"]
    second = await world.worker("w2", reply_wait_s=60)
    await world.place(request, "w2", 2, previous_lane="w1-0")
    await world.until(lambda: request.session_id in second.worker.roster.seats)
    await second.close()
    del world.runs["w2"]
    third = await world.worker("w3", reply_wait_s=60)
    await world.place(request, "w3", 3, previous_lane="w2-0")
    await world.until(lambda: request.session_id in third.worker.roster.seats)
    world.answering = True
    await world.reward(row, lane="w1-0")
    await world.reward(rows[1], lane="w1-0")
    found = await world.until(lambda: [r for r in world.steps(request.session_id) if r.step == 2])
    if "lag_steps" in lag:
        assert named(found[0]) == [("reward", 0)]
    else:
        assert set(named(found[0])) == {("reward", 0), ("reward", 1)}
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.steps) == ("completed", 4)
    assert (await world.verdict(request)).ok


async def run_with_tools(world: World, worker: str, **lag: int) -> tuple[Any, Tools]:
    """A session with three tools that do not block, whose worker dies in the midst of them."""
    tools = Tools(world)
    first = await world.worker(worker, reply_wait_s=0.5)
    request = await world.run_session(code_of(AGENT, tools=LATE), max_steps=5, **lag)
    turns = await tools.until_called(request.session_id, 1)
    await first.close()
    del world.runs[worker]
    await world.worker(f"{worker}b", reply_wait_s=0.5)
    await world.place(request, f"{worker}b", 2, previous_lane=f"{worker}-0")
    await tools.until_called(request.session_id, 2)
    await tools.answer(turns[0])
    tools.answering = True
    return request, tools


async def test_with_lag_steps_a_killed_session_ends_with_the_chain_of_an_undisturbed_one(
    world: World,
) -> None:
    world.record()
    world.answering = True
    request, tools = await run_with_tools(world, "w1", lag_steps=2)
    ended = await world.ended(request.session_id)
    assert (ended.fact.code, ended.fact.steps) == ("max_steps", 5)
    assert (await world.verdict(request)).ok
    await world.worker("w1", reply_wait_s=0.5)
    undisturbed = await world.run_session(code_of(AGENT, tools=LATE), max_steps=5, lag_steps=2)
    assert tools.answering
    assert (await world.ended(undisturbed.session_id)).fact.chain == ended.fact.chain


async def test_without_lag_steps_a_killed_session_with_late_tools_verifies(world: World) -> None:
    world.record()
    world.answering = True
    request, _ = await run_with_tools(world, "w1")
    ended = await world.ended(request.session_id)
    assert (ended.fact.code, ended.fact.steps) == ("max_steps", 5)
    verdict = await world.verdict(request)
    assert (verdict.first_divergence, verdict.complete) == (None, True)
