"""Anchors on the whole stack: a killed worker's sessions go on from their anchors, and end as if
nothing had been; and what the commands say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsec.client.client import Client

pytestmark = [pytest.mark.stack, pytest.mark.long]

SESSIONS, STEPS, EVERY = 12, 240, 20
AGENT = """
import numpy as np

class Agent:
    def __init__(self, session_config):
        self.space = session_config["action_space"]
        self.weights, self.total = np.zeros(4), 0.0

    def step(self, observation):
        lean = int(observation @ self.weights + 0.01 * self.total > 0)
        return {"action": (self.space.sample() + lean) % 2}

    def on_reward(self, reward, done, info):
        self.total += reward
        self.weights[info["dsec"]["step"] % 4] += reward

    def get_state(self):
        return {"weights": self.weights.copy(), "total": self.total}

    def set_state(self, state):
        self.weights, self.total = state["weights"], state["total"]
"""
SLOW = """
from gymnasium.envs.classic_control import CartPoleEnv

class Env(CartPoleEnv):
    def step(self, action):
        for _ in range(40_000):  # a sleep would be virtual
            pass
        return super().step(action)
"""


async def _chains(
    client: Client, stack: Any, session: Path, disturb: Callable[[], Any] | None
) -> dict[int, str]:
    """Chains by seed. Disturbed when two thirds of the steps are logged."""
    group = await client.request(session, count=SESSIONS)
    ids = list(group.session_ids)
    if disturb is not None:
        enough = SESSIONS * STEPS * 2 // 3
        count = "select count(*) as n from step_trace where session_id = any(%(ids)s)"
        await asyncio.to_thread(
            stack.until, lambda: stack.sql(count, ids=ids)[0]["n"] >= enough, 60
        )
        await asyncio.to_thread(disturb)
    async with asyncio.timeout(120):
        rows = await client.wait(group)
    assert {row.status for row in rows} == {"completed"}, rows
    if disturb is not None:
        assert max(row.attempts for row in rows) > 1
        _restarts_were_short(stack, ids)
    for row in rows[:2]:
        verdict = await asyncio.to_thread(stack.dsec, "verify", str(row.session_id))
        assert verdict["ok"], verdict
    _anchors_are_all_there(stack, ids)
    return {row.seed: row.chain_hash or "" for row in rows}


def _anchors_are_all_there(stack: Any, ids: list[Any]) -> None:
    query = "select session_id, position, status from anchor where session_id = any(%(ids)s)"
    stack.until(lambda: all(row["status"] == "stored" for row in stack.sql(query, ids=ids)))
    rows = stack.sql(query, ids=ids)
    wanted = [(sid, n) for sid in ids for n in range(EVERY, STEPS + 1, EVERY)]
    assert sorted((row["session_id"], row["position"]) for row in rows) == sorted(wanted)


def _restarts_were_short(stack: Any, ids: list[Any]) -> None:
    """Few steps were executed again, where without anchors it would have been all."""
    rows = stack.sql(
        "select circumstance as told from event_log where kind = 'session.resumed'"
        " and session_id = any(%(ids)s)",
        ids=ids,
    )
    assert rows
    recorded = sum(row["told"]["steps_recorded"] for row in rows)
    again = sum(row["told"]["steps_recorded"] - row["told"]["from_step"] for row in rows)
    assert again < recorded / 3, (again, recorded)
    assert all(row["told"]["misses"] == [] for row in rows)


def _kill(stack: Any) -> None:
    processes = stack.workers()
    assert processes
    for process in processes:
        process.kill()


async def test_a_killed_worker_changes_no_chain_and_little_is_executed_again(
    stack: Any, client: Client, session_files: Callable[..., Path]
) -> None:
    session = session_files(
        AGENT,
        env="entry: env.py:Env\ncode: [env.py]\n",
        files={"env.py": SLOW},
        max_steps=STEPS,
        agent_keys=f"code: [agent.py]\nanchors: {{every_steps: {EVERY}}}\n",
        name="anchors",
    )
    undisturbed = await _chains(client, stack, session, None)
    disturbed = await _chains(client, stack, session, lambda: _kill(stack))
    assert disturbed == undisturbed


async def test_what_the_commands_say(
    stack: Any, client: Client, session_files: Callable[..., Path]
) -> None:
    session = session_files(
        AGENT, max_steps=50, agent_keys="anchors: {every_steps: 10}\n", name="said"
    )
    group = await client.request(session)
    async with asyncio.timeout(60):
        await client.wait(group)
    named = str(group.session_ids[0])
    stack.until(lambda: len(stack.dsec("anchors", "list", named)) == 5)
    stack.until(
        lambda: {row["status"] for row in stack.dsec("anchors", "list", named)} == {"stored"}
    )
    listed = stack.dsec("anchors", "list", named)
    assert [row["position"] for row in listed] == [10, 20, 30, 40, 50]
    assert listed[1]["parent"] == listed[0]["anchor_id"]
    shown = stack.dsec("anchors", "show", named, listed[2]["anchor_id"][:8])
    assert shown == listed[2]
    assert stack.dsec("anchors", "check", named) | {"bad": []} == {
        "ok": True,
        "checked": 5,
        "missing": 0,
        "damaged": 0,
        "lost": 0,
        "captured": 0,
        "bad": [],
    }
    blob = listed[4]["blob"]
    path = Path(stack.object_store_url.removeprefix("file://")) / blob[:2] / blob
    path.rename(path.with_suffix(".gone"))
    found = stack.dsec("anchors", "check", named, exit_code=1)
    path.with_suffix(".gone").rename(path)
    assert (found["ok"], found["missing"], found["bad"][0]["position"]) == (False, 1, 50)
    rate = stack.dsec("metrics", "--metric", "anchor_miss_rate")
    assert rate["collected"]
    assert rate["value"] in (None, 0.0)
