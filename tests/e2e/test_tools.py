"""Tools on the whole stack: turns, deadlines, and kills that change nothing."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import dsec.examples.language
from dsec.client.client import Client
from dsec.examples.language.model_server import ModelHandler, serve
from dsec_contracts import decode

pytestmark = [pytest.mark.stack, pytest.mark.long]

SESSIONS = 6
STEPS = 6

AGENT = """
import json

class Agent:
    def __init__(self, session_config):
        self.names = [tool["name"] for tool in session_config["tools"]]
        self.turn, self.heard = 0, []

    def step(self, observation):
        self.turn += 1
        if self.turn == 1:
            near = {"name": "lookup", "arguments": {"x": round(float(observation[2]), 6)}}
            return {"tool_calls": [near, near]}
        if self.turn == 2:
            arguments = json.dumps({"x": len(self.heard)})
            call = {"type": "function", "function": {"name": "slow", "arguments": arguments}}
            return {"tool_calls": [call]}
        self.turn = 0
        return {"action": len(json.dumps(self.heard)) % 2}

    def on_tool_result(self, tool_id, result):
        self.heard.append([tool_id, result])
"""
TOOLS = """
import time

def lookup(x):
    return {"x": x, "double": 2 * x}

def slow(x):
    time.sleep(0.4)
    return [x] * 3

def stuck(x):
    while True:
        pass

def once(x, *, idempotency_key):
    with open(x, "a") as file:
        file.write(idempotency_key + "\\n")
    time.sleep(4)
"""
SCHEMA = "parameters: {type: object, properties: {x: {}}, required: [x]}\n"
FILES = {
    "tools.py": TOOLS,
    **{
        f"{name}.yaml": f"name: {name}\nentry: tools.py:{name}\ncode: [tools.py]\n{SCHEMA}{more}"
        for name, more in (
            ("lookup", "idempotent: true\n"),
            ("slow", "idempotent: true\n"),
            ("stuck", "deadline_s: 1\n"),
            ("once", "deadline_s: 6\n"),
        )
    },
}
KEYS = "code: [agent.py]\ntools: [{ref: lookup}, {ref: slow}]\n"


def _tool_calls(stack: Any, ids: list[Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.sql(
        "select * from tool_call where session_id = any(%(ids)s)", ids=ids
    )
    return found


def _kill(processes: list[psutil.Process]) -> None:
    assert processes
    for process in processes:
        process.kill()


async def _chains(
    client: Client, stack: Any, session: Path, disturb: Callable[[], Any] | None
) -> dict[int, str]:
    """Chains by seed; disturbed when a third of the calls are there."""
    group = await client.request(session, count=SESSIONS)
    ids = list(group.session_ids)
    if disturb is not None:
        third = SESSIONS * STEPS * 3 // 3
        await asyncio.to_thread(stack.until, lambda: len(_tool_calls(stack, ids)) >= third, 60)
        await asyncio.to_thread(disturb)
    async with asyncio.timeout(120):
        rows = await client.wait(group)
    assert {row.status for row in rows} == {"completed"}, rows
    calls = _tool_calls(stack, ids)
    assert len(calls) == SESSIONS * STEPS * 3
    assert {call["status"] for call in calls} == {"returned"}
    for session_id in ids[:2]:
        verdict = await asyncio.to_thread(stack.dsec, "verify", str(session_id))
        assert verdict["ok"], verdict
    return {row.seed: row.chain_hash for row in rows}


async def test_kills_of_workers_and_of_the_service_change_nothing(
    stack: Any, client: Client, session_files: Callable[..., Path]
) -> None:
    session = session_files(AGENT, max_steps=STEPS, agent_keys=KEYS, files=FILES)
    undisturbed = await _chains(client, stack, session, None)
    assert len(set(undisturbed.values())) == SESSIONS
    for kill in (
        lambda: _kill(stack.workers()),
        lambda: _kill(stack.processes("dsec.tool")),
        lambda: _kill(stack.workers() + stack.processes("dsec.tool")),
    ):
        assert await _chains(client, stack, session, kill) == undisturbed
    assert not stack.sql("select 1 from event_aside where verdict = 'conflict'")


async def test_a_tool_that_never_returns_costs_its_deadline(
    stack: Any, client: Client, session_files: Callable[..., Path]
) -> None:
    agent = AGENT.replace('"slow"', '"stuck"')
    keys = KEYS.replace("slow", "stuck")
    session = session_files(agent, max_steps=2, agent_keys=keys, files=FILES)
    group = await client.request(session)
    async with asyncio.timeout(60):
        [row] = await client.wait(group)
    assert (row.status, row.steps) == ("completed", 2)
    calls = _tool_calls(stack, list(group.session_ids))
    stuck = [call for call in calls if call["tool"] == "stuck"]
    assert [call["code"] for call in stuck] == ["deadline"] * 2
    assert max(call["seconds"] for call in stuck) < 5
    names = {tool["name"] for tool in stack.dsec("tools", "list")}
    assert {"lookup", "stuck"} <= names
    by_tool = {row["tool"]: row for row in stack.dsec("tools", "status")}
    assert (by_tool["stuck"]["failed"], by_tool["stuck"]["code_most"]) == (2, "deadline")
    told = stack.dsec("tools", "status", "--session-id", str(row.session_id))
    assert [one["call_id"] for one in told] == [
        *("call_0_0_0", "call_0_0_1", "call_0_1_0"),
        *("call_1_0_0", "call_1_0_1", "call_1_1_0"),
    ]
    assert 0 < stack.dsec("metrics", "--metric", "tool_failure_rate")["value"] < 1


async def test_a_call_that_may_not_be_repeated_is_of_unknown_outcome(
    stack: Any, client: Client, session_files: Callable[..., Path], tmp_path: Path
) -> None:
    effects = tmp_path / "effects"
    agent = AGENT.replace('"slow"', '"once"').replace("len(self.heard)})", f"{str(effects)!r}}})")
    session = session_files(
        agent, max_steps=1, agent_keys=KEYS.replace("slow", "once"), files=FILES
    )
    group = await client.request(session)
    await asyncio.to_thread(stack.until, effects.exists, 30)
    _kill(stack.processes("dsec.tool"))
    async with asyncio.timeout(90):
        [row] = await client.wait(group)
    assert (row.status, row.steps) == ("completed", 1)
    [call] = [c for c in _tool_calls(stack, list(group.session_ids)) if c["tool"] == "once"]
    assert (call["status"], call["code"]) == ("failed", "outcome_unknown")
    assert len(effects.read_text().splitlines()) == 1


class Flaky(ModelHandler):
    """Refuses every third request, as a busy server does."""

    requests = 0

    def complete(self, body: dict[str, Any]) -> None:
        Flaky.requests += 1
        if Flaky.requests % 3 == 0:
            self.send_json(429, {"error": {"message": "busy"}}, Retry_After="0.2")
        else:
            super().complete(body)


async def test_a_language_agent_with_a_model_and_a_tool(
    stack: Any, client: Client, tmp_path: Path
) -> None:
    """Equal sessions have equal chains although each answer of the model has an id of its own, and
    are verified when the model is gone."""
    folder = tmp_path / "language"
    shutil.copytree(Path(dsec.examples.language.__file__).parent, folder)
    server = serve(0, Flaky)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    model = (folder / "model.yaml").read_text()
    (folder / "model.yaml").write_text(model.replace("8765", str(server.server_port)))
    group = await client.request(folder / "session.yaml", count=4, seeds="same")
    async with asyncio.timeout(120):
        rows = await client.wait(group)
    server.shutdown()
    server.server_close()
    assert {(row.status, row.reward_total) for row in rows} == {("completed", 1.0)}, rows
    assert len({row.chain_hash for row in rows}) == 1
    calls = _tool_calls(stack, list(group.session_ids))
    assert {call["status"] for call in calls} == {"returned"}
    assert sorted(call["tool"] for call in calls) == ["model"] * 8 + ["stock"] * 4
    assert stack.sql("select 1 from event_log where kind = 'tool.retried' limit 1")
    for row in rows[:2]:
        assert stack.dsec("verify", str(row.session_id))["ok"]
    asked = Flaky.requests
    [episode] = [one async for one in client.episodes(group=group)][:1]
    assert Flaky.requests == asked
    assert len(episode.extras["token_ids"][0]) == 1
    [step] = stack.sql(
        "select extras from event_log where kind = 'session.stepped' and session_id = %(id)s",
        id=rows[0].session_id,
    )
    assert decode(step["extras"])["provenance"]["tool_call_id"] == "call_0_1_0"


async def test_a_result_too_large_for_a_message_changes_nothing(
    stack: Any, client: Client, session_files: Callable[..., Path]
) -> None:
    tools = TOOLS.replace("return [x] * 3", "return [x] * 200_000")
    files = FILES | {"tools.py": tools}
    session = session_files(AGENT, max_steps=2, agent_keys=KEYS, files=files)
    group = await client.request(session, count=2, seeds="same")
    async with asyncio.timeout(60):
        rows = await client.wait(group)
    assert {(row.status, row.steps) for row in rows} == {("completed", 2)}, rows
    assert len({row.chain_hash for row in rows}) == 1
    [stored] = stack.sql(
        "select count(distinct fact_json->>'blob') as blobs, count(*) as results from event_log "
        "where kind = 'tool.returned' and session_id = any(%(ids)s) and fact_json->>'blob' "
        "is not null",
        ids=list(group.session_ids),
    )
    assert (stored["blobs"], stored["results"]) == (2, 4)  # the same bytes are one blob
    for row in rows:
        assert stack.dsec("verify", str(row.session_id))["ok"]
