"""Writes what a version leaves behind, for later versions to read.

    python tests/upgrade/record.py tests/upgrade/NAME

Run it with the version that shall be recorded. It starts that version's embedded stack, lets a few
short sessions end in it, and writes what the stream and the log then hold: each message with its
subject, headers and body (heartbeats too, which the stream does not have), each row with all its
columns, bytes in base64, and what the sessions came to. What was written is never edited.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import nats
import psycopg
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from psycopg.rows import dict_row

from dsec.client.client import Client
from dsec.client.verification import verify_sessions
from dsec.platform.stack import stack_status

ANSWER_S_MAX = 5.0
ENDED_S_MAX = 120.0
NO_MESSAGE = 10037
NAMES = {"DSEC_REWARD_REPLICA": "reward-1", "DSEC_TOOL_REPLICA": "tool-1"}
"""Instead of names of the machine."""

AGENT = '''
class Agent:
    """Acts on all that it was told so far; a tool, where it has one, is asked before each step."""

    def __init__(self, session_config):
        self.space = session_config["action_space"]
        self.tools = bool(session_config["tools"])
        self.total, self.asked = 0.0, False

    def step(self, observation):
        if self.tools and not self.asked:
            self.asked = True
            return {"tool_calls": [{"name": "lookup", "arguments": {"x": self.total}}]}
        self.asked = False
        return {"action": (self.space.sample() + int(self.total)) % 2}

    def on_reward(self, reward, done, info):
        self.total += reward

    def on_tool_result(self, tool_id, result):
        self.total += result["y"]
'''
FAILING = '''
class Agent:
    """Does not get far."""

    def __init__(self, session_config):
        self.steps = 0

    def step(self, observation):
        self.steps += 1
        if self.steps > 4:
            raise ValueError("this agent fails at its fifth step")
        return {"action": 1, "extras": {"log_probability": -0.5}}

    def on_reward(self, reward, done, info):
        pass
'''
CRASHING = '''
import os


class Agent:
    """Takes its worker along."""

    def __init__(self, session_config):
        self.steps = 0

    def step(self, observation):
        self.steps += 1
        if self.steps > 3:
            os._exit(3)
        return {"action": 0}

    def on_reward(self, reward, done, info):
        pass
'''
REWARD = """
import dsec


@dsec.reward(weights={"alive": 0.5, "moved": 2.0})
def scored(t, services):
    moved = abs(float(t.next_observation[0] - t.observation[0]))
    return {"alive": t.env_reward, "moved": moved}
"""
FILES = {
    "agent.py": AGENT,
    "failing.py": FAILING,
    "crashing.py": CRASHING,
    "reward.py": REWARD,
    "tools.py": "def lookup(x):\n    return {'y': (x * 7 + 1) % 5}\n",
    "lookup.yaml": "name: lookup\nentry: tools.py:lookup\ncode: [tools.py]\nidempotent: true\n"
    "parameters: {type: object, properties: {x: {type: number}}, required: [x]}\n",
    "plain.yaml": "entry: agent.py:Agent\ncode: [agent.py]\n",
    "asking.yaml": "entry: agent.py:Agent\ncode: [agent.py]\ntools: [{ref: lookup}]\n",
    "failing.yaml": "entry: failing.py:Agent\ncode: [failing.py]\n",
    "crashing.yaml": "entry: crashing.py:Agent\ncode: [crashing.py]\n",
    "env.yaml": "entry: gymnasium:CartPole-v1\n",
}
CASES = {
    # name: agent, reward, steps, sessions
    "env_reward": ("plain.yaml", "env", 24, 2),
    "function_reward": ("plain.yaml", "reward.py:scored", 24, 2),
    "tools": ("asking.yaml", "reward.py:scored", 12, 2),
    "failed": ("failing.yaml", "env", 12, 1),
    "crashed": ("crashing.yaml", "env", 12, 1),
}


async def run_cases(client: Client, folder: Path) -> list[dict[str, Any]]:
    """Let the sessions end; returns what they came to."""
    for name, content in FILES.items():
        (folder / name).write_text(content)
    cases: dict[UUID, str] = {}
    for name, (agent, reward, steps, count) in CASES.items():
        session = folder / f"{name}.session.yaml"
        session.write_text(
            f"agent: {agent}\nenv: env.yaml\nreward: {reward}\nseed: 5\nmax_steps: {steps}\n"
            f"labels: {{case: {name}}}\n"
        )
        group = await client.request(session, count=count)
        cases |= dict.fromkeys(group.session_ids, name)
    await client.wait(list(cases), timeout_s=ENDED_S_MAX)
    verdicts = await verify_sessions(client, list(cases))
    assert all(verdict["ok"] for verdict in verdicts), verdicts
    return [
        {
            "session_id": str(one.session_id),
            "case": cases[one.session_id],
            "status": one.status,
            "code": one.code,
            "steps": one.steps,
            "reward_total": one.reward_total,
            "chain_hash": one.chain_hash,
        }
        for one in await client.queries.summaries(list(cases))
    ]


async def messages(nc: NatsClient) -> list[dict[str, Any]]:
    """All that the stream holds."""

    async def ask(call: str, body: Any = None) -> dict[str, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        reply = await nc.request(f"$JS.API.STREAM.{call}.DSEC", data, timeout=ANSWER_S_MAX)
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    found = []
    last = (await ask("INFO"))["state"]["last_seq"]
    for sequence in range(1, last + 1):
        answer = await ask("MSG.GET", {"seq": sequence})
        if "error" in answer:
            assert answer["error"]["err_code"] == NO_MESSAGE, answer
            continue
        message = answer["message"]
        found.append(
            {
                "sequence": sequence,
                "subject": message["subject"],
                "time": message["time"],
                "headers": headers_of(message.get("hdrs", "")),
                "body": message.get("data", ""),
            }
        )
    return found


def headers_of(encoded: str) -> dict[str, str]:
    """The headers of a stored message, in their order."""
    lines = base64.b64decode(encoded).decode().split("\r\n")[1:]
    return {
        name: value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }


def rows(connection: psycopg.Connection[dict[str, Any]], table: str) -> list[dict[str, Any]]:
    """All rows of a table, JSON as the text that it is kept as."""
    columns = connection.execute(
        "select attname, format_type(atttypid, null) as type from pg_attribute"
        " where attrelid = %s::regclass and attnum > 0 and not attisdropped order by attnum",
        (table,),
    ).fetchall()
    names = [
        f'"{one["attname"]}"::text' if one["type"] in ("json", "jsonb") else f'"{one["attname"]}"'
        for one in columns
    ]
    found = connection.execute(
        f"select {', '.join(names)} from {table} order by 1, 2, 3"
    ).fetchall()
    return [{name: plain(value) for name, value in row.items()} for row in found]


def plain(value: Any) -> Any:
    """A value as JSON can carry it."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, UUID | datetime) else value


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """JSON, one a line, compressed."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    # Without a time in it, so that the same lines are the same file.
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


async def record(state_dir: Path, sources: Path, folder: Path) -> None:
    """Everything, from a stack that runs."""
    endpoints = stack_status(state_dir).endpoints
    assert endpoints is not None
    heartbeats: list[dict[str, Any]] = []

    async def on_heartbeat(message: Msg) -> None:
        body = base64.b64encode(message.data).decode()
        headers = dict(message.headers or {})
        heartbeats.append({"subject": message.subject, "headers": headers, "body": body})

    nc = await nats.connect(endpoints.nats_url)
    await nc.subscribe("dsec.worker.heartbeat.*", cb=on_heartbeat)
    async with Client(
        nats_url=endpoints.nats_url,
        database_url=endpoints.database_url,
        object_store_url=endpoints.object_store_url,
    ) as client:
        sessions = await run_cases(client, sources)
    write_lines(folder / "heartbeats.jsonl.gz", heartbeats)
    write_lines(folder / "stream.jsonl.gz", await messages(nc))
    await nc.close()
    with psycopg.connect(endpoints.database_url, row_factory=dict_row) as connection:
        revision = connection.execute("select version_num from alembic_version").fetchone()
        assert revision is not None
        for table in ("event_log", "event_aside", "log_floor"):
            write_lines(folder / f"{table}.jsonl.gz", rows(connection, table))
    about = {"revision": revision["version_num"], "sessions": sessions}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    """Start the stack, record, stop it."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    dsec = [sys.executable, "-m", "dsec.cli"]
    with tempfile.TemporaryDirectory() as name:
        state_dir, sources = Path(name) / "state", Path(name) / "sources"
        sources.mkdir()
        at = ["--state-dir", str(state_dir)]
        subprocess.run([*dsec, "up", "--detach", *at], env={**os.environ, **NAMES}, check=True)
        try:
            asyncio.run(record(state_dir, sources, folder))
        finally:
            subprocess.run([*dsec, "down", *at], check=True)


if __name__ == "__main__":
    main()
