"""A whole stack on an S3 server: large anchors lie there, and user code sees no credentials."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests import seaweedfs
from tests.e2e.conftest import DSEC, RunningStack, running_stack

from dsec.platform.objects import ObjectStore

pytestmark = [pytest.mark.stack, pytest.mark.s3, pytest.mark.long]

SESSIONS, STEPS, EVERY = 4, 200, 20
AGENT = """
import os
import random

class Agent:
    def __init__(self, session_config):
        self.own = random.Random(session_config["seed"])
        self.ballast = self.own.randbytes(300_000)

    def step(self, observation):
        seen = [name for name, value in os.environ.items() if "for-tests-only" in value]
        with open("/proc/self/environ", "rb") as file:
            seen += ["initial"] * (b"for-tests-only" in file.read())
        for _ in range(60_000):  # a sleep would be virtual
            pass
        assert not seen, seen
        return {"action": self.own.getrandbits(1)}
"""


async def test_a_stack_keeps_its_anchors_in_a_bucket(
    s3_server: seaweedfs.Server, tmp_path: Path, session_files: Callable[..., Path]
) -> None:
    url = replace(s3_server, prefix=tmp_path.name).url
    state_dir = tmp_path / "state"
    with running_stack(state_dir, "--object-store-url", url) as stack:
        assert stack.object_store_url == url
        await _killed_sessions_come_back(stack, session_files)
        logs = "".join(path.read_text() for path in state_dir.rglob("*.log"))
        for secret in seaweedfs.CREDENTIALS.values():
            assert secret not in logs


async def _killed_sessions_come_back(
    stack: RunningStack, session_files: Callable[..., Path]
) -> None:
    keys = f"code: [agent.py]\nanchors: {{every_steps: {EVERY}}}\n"
    session = session_files(AGENT, max_steps=STEPS, agent_keys=keys, name="bucket")
    stored = "select blob from anchor where status = 'stored'"
    async with stack.client() as client:
        group = await client.request(session, count=SESSIONS)
        await asyncio.to_thread(stack.until, lambda: len(stack.sql(stored)) >= SESSIONS * 4, 90)
        for process in stack.workers():
            process.kill()
        async with asyncio.timeout(120):
            rows = await client.wait(group)
    assert {row.status for row in rows} == {"completed"}, rows
    resumed = stack.sql("select circumstance as told from event_log where kind = 'session.resumed'")
    assert resumed
    assert all(row["told"]["from_step"] > 0 for row in resumed), resumed
    everything = SESSIONS * STEPS // EVERY
    await asyncio.to_thread(stack.until, lambda: len(stack.sql(stored)) == everything, 60)
    store = ObjectStore(stack.object_store_url)
    assert all(len(store.get(row["blob"])) > 300_000 for row in stack.sql(stored))
    where = {
        "DSEC_DATABASE_URL": stack.database_url,
        "DSEC_NATS_URL": stack.nats_url,
        "DSEC_OBJECT_STORE_URL": stack.object_store_url,
    }
    check = await asyncio.to_thread(
        subprocess.run,
        [*DSEC, "anchors", "check", "--json"],
        env={**os.environ, **where},
        capture_output=True,
        timeout=180,
        check=True,
    )
    told = json.loads(check.stdout)
    assert (told["ok"], told["checked"]) == (True, everything)
