"""Rewards that ask an outside service, on the whole stack: declared, scored, recorded, verified."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.reward.http_service import Answer, Asked, http_service

from dsec.client.client import Client

pytestmark = [pytest.mark.stack, pytest.mark.long]

STEPS = 12
REWARD = """
import dsec

@dsec.reward(weights={"stock": 1.0, "alive": 0.5}, services=["stock"])
async def score(t, services):
    found = await services["stock"].get("/left", params={"action": t.action, "step": t.step})
    return {"stock": found.json()["left"], "alive": t.env_reward}
"""


async def test_a_reward_that_asks_is_declared_scored_recorded_and_verified(
    stack: Any,
    client: Client,
    session_files: Callable[..., Path],
    good_agent: str,
    tmp_path: Path,
) -> None:
    async def left(asked: Asked) -> Answer:
        return Answer(body={"left": len(service.asked) * 0.25})

    async with http_service() as service:
        service.behave = left
        declared = tmp_path / "services.yaml"
        declared.write_text(f"stock:\n  base_url: {service.url}\n  qps_budget: 200\n")
        told = await asyncio.to_thread(stack.dsec, "services", "declare", str(declared))
        assert told == [{"name": "stock", "version": 1, "declared": True}]
        told = await asyncio.to_thread(stack.dsec, "services", "declare", str(declared))
        assert told == [{"name": "stock", "version": 1, "declared": False}]
        session = session_files(
            good_agent, max_steps=STEPS, reward="reward.py:score", files={"reward.py": REWARD}
        )
        group = await client.request(session, count=3)
        async with asyncio.timeout(90):
            rows = await client.wait(group)
        assert {row.status for row in rows} == {"completed"}, rows
        assert len(service.asked) == 3 * STEPS
        [status] = await asyncio.to_thread(stack.dsec, "services", "status")
        assert (status["name"], status["mode"], status["qps_budget"]) == (
            "stock",
            "synchronous",
            200,
        )
        declared.write_text(f"stock:\n  base_url: {service.url}\n  qps_budget: 100\n")
        told = await asyncio.to_thread(stack.dsec, "services", "declare", str(declared))
        assert told == [{"name": "stock", "version": 2, "declared": True}]
        [one] = await asyncio.to_thread(stack.dsec, "services", "list")
        assert (one["name"], one["version"], one["qps_budget"]) == ("stock", 2, 100)
    # The service is gone: what it answered is in the log.
    for session_id in group.session_ids:
        verdict = await asyncio.to_thread(stack.dsec, "verify", str(session_id))
        assert verdict["ok"], verdict
        assert verdict["reward_ok"], verdict
    assert len(service.asked) == 3 * STEPS
    [recorded] = stack.sql(
        "select count(extras) as n from event_log where kind = 'reward.scored'"
        " and session_id = any(%(ids)s)",
        ids=list(group.session_ids),
    )
    assert recorded["n"] == 3 * STEPS


DOWN_S = 60.0


async def test_a_service_that_is_down_for_a_minute_costs_time_and_no_reward(
    stack: Any,
    client: Client,
    session_files: Callable[..., Path],
    good_agent: str,
    tmp_path: Path,
) -> None:
    async def left(asked: Asked) -> Answer:
        return Answer(body={"left": (int(asked.params["step"]) % 8) * 0.25})

    sessions, steps = 8, 40
    async with http_service() as service:
        service.behave = left
        declared = tmp_path / "services.yaml"
        declared.write_text(
            f"stock:\n  base_url: {service.url}\n  qps_budget: 40\n  deadline_s: 180\n"
            "  retry: {attempts_max: 100, backoff_s_max: 2}\n"
        )
        await asyncio.to_thread(stack.dsec, "services", "declare", str(declared))
        session = session_files(
            good_agent, max_steps=steps, reward="reward.py:score", files={"reward.py": REWARD}
        )
        group = await client.request(session, count=sessions)
        await asyncio.to_thread(stack.until, lambda: len(service.asked) >= sessions * 5)
        await service.stop()
        before = len(service.asked)
        await asyncio.sleep(DOWN_S)
        assert len(service.asked) == before
        assert {row.status for row in await client.queries.summaries(group.session_ids)} == {
            "running"
        }
        await service.start()
        async with asyncio.timeout(120):
            rows = await client.wait(group)
    assert {(row.status, row.code) for row in rows} == {("completed", "max_steps")}
    assert {row.rewards_missing for row in rows} == {0}
    trace = stack.sql(
        "select step, reward, env_reward from reward_trace where session_id = any(%(ids)s)",
        ids=list(group.session_ids),
    )
    assert len(trace) == sessions * steps
    for row in trace:
        assert row["reward"] == (row["step"] % 8) * 0.25 + 0.5 * row["env_reward"], row
    verdict = await asyncio.to_thread(stack.dsec, "verify", str(group.session_ids[0]))
    assert (verdict["ok"], verdict["reward_ok"]) == (True, True), verdict


TOOLS_AND_REWARD = """
import time
import dsec

def think(x):
    time.sleep(0.02 * (x % 5))
    return x * x

@dsec.reward(weights={"stock": 1.0}, services=["stock"])
async def score(t, services):
    found = await services["stock"].get("/left", params={"action": t.action, "step": t.step})
    return {"stock": found.json()["left"]}
"""
THINKING_AGENT = """
class Agent:
    def __init__(self, session_config):
        self.heard, self.steps = 0.0, 0

    def step(self, observation):
        self.steps += 1
        decision = {"action": int(observation[2] + self.heard * 0.01 > 0)}
        if self.steps % 3 == 0:
            arguments = {"x": self.steps}
            decision["tool_calls"] = [{"name": "think", "arguments": arguments}]
        return decision

    def on_tool_result(self, tool_id, result):
        self.heard += result

    def on_reward(self, reward, done, info):
        self.heard -= reward
"""


async def test_a_worker_that_is_drained_or_killed_while_inputs_are_late_changes_no_chain(
    stack: Any,
    client: Client,
    session_files: Callable[..., Path],
    tmp_path: Path,
) -> None:
    async def left(asked: Asked) -> Answer:
        await asyncio.sleep(0.3)  # slow enough to be deferred
        return Answer(body={"left": (int(asked.params["step"]) % 8) * 0.25})

    async def chains(name: str, send: signal.Signals | None) -> dict[int, str | None]:
        session = session_files(
            THINKING_AGENT,
            name=name,
            max_steps=90,
            agent_keys="code: [agent.py]\ntools: [{ref: think, blocking: false}]\n",
            session_keys="lag_steps: 4\n",
            reward="world.py:score",
            files={
                "world.py": TOOLS_AND_REWARD,
                "think.yaml": "name: think\nentry: world.py:think\ncode: [world.py]\n"
                "idempotent: true\n"
                "parameters: {type: object, properties: {x: {}}, required: [x]}\n",
            },
        )
        group = await client.request(session, count=12)
        ids = list(group.session_ids)
        if send is not None:
            for most in (200, 500):
                await asyncio.to_thread(
                    stack.until,
                    lambda most=most: (
                        stack.sql(
                            "select count(*) as n from event_log where session_id = any(%(ids)s)"
                            " and kind = 'session.stepped'",
                            ids=ids,
                        )[0]["n"]
                        > most
                    ),
                    60.0,
                )
                for worker in stack.workers():
                    worker.send_signal(send)
        async with asyncio.timeout(150):
            rows = await client.wait(group)
        assert {(row.status, row.code) for row in rows} == {("completed", "max_steps")}, rows
        if send is not None:
            assert max(row.attempts for row in rows) >= 2
        verdict = await asyncio.to_thread(stack.dsec, "verify", str(ids[0]))
        assert (verdict["ok"], verdict["reward_ok"]) == (True, True), verdict
        return {row.seed: row.chain_hash for row in rows}

    async with http_service() as service:
        service.behave = left
        declared = tmp_path / "services.yaml"
        declared.write_text(f"stock:\n  base_url: {service.url}\n  qps_budget: 100\n")
        await asyncio.to_thread(stack.dsec, "services", "declare", str(declared))
        undisturbed = await chains("undisturbed", None)
        assert await chains("drained", signal.SIGTERM) == undisturbed
        assert await chains("killed", signal.SIGKILL) == undisturbed
    [deferred] = stack.sql("select count(*) as n from event_log where kind = 'reward.deferred'")
    assert deferred["n"] > 0
