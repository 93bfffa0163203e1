"""Rewards that ask an outside service, on the whole stack: declared, scored, recorded, verified."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import DSEC
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


def _dsec(stack: Any, *arguments: str) -> Any:
    """What a command answers in JSON."""
    done = subprocess.run(
        [*DSEC, *arguments, "--json"],
        env={
            **os.environ,
            "DSEC_NATS_URL": stack.nats_url_of("dsec-client"),
            "DSEC_DATABASE_URL": stack.database_url,
            "DSEC_OBJECT_STORE_URL": stack.object_store_url,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


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
        told = await asyncio.to_thread(_dsec, stack, "services", "declare", str(declared))
        assert told == [{"name": "stock", "version": 1, "declared": True}]
        told = await asyncio.to_thread(_dsec, stack, "services", "declare", str(declared))
        assert told == [{"name": "stock", "version": 1, "declared": False}]
        session = session_files(
            good_agent, max_steps=STEPS, reward="reward.py:score", files={"reward.py": REWARD}
        )
        group = await client.request(session, count=3)
        async with asyncio.timeout(90):
            rows = await client.wait(group)
        assert {row.status for row in rows} == {"completed"}, rows
        assert len(service.asked) == 3 * STEPS
        [status] = await asyncio.to_thread(_dsec, stack, "services", "status")
        assert (status["name"], status["mode"], status["qps_budget"]) == (
            "stock",
            "synchronous",
            200,
        )
        declared.write_text(f"stock:\n  base_url: {service.url}\n  qps_budget: 100\n")
        told = await asyncio.to_thread(_dsec, stack, "services", "declare", str(declared))
        assert told == [{"name": "stock", "version": 2, "declared": True}]
        [one] = await asyncio.to_thread(_dsec, stack, "services", "list")
        assert (one["name"], one["version"], one["qps_budget"]) == ("stock", 2, 100)
    # The service is gone: what it answered is in the log.
    for session_id in group.session_ids:
        verdict = await asyncio.to_thread(_dsec, stack, "verify", str(session_id))
        assert verdict["ok"], verdict
        assert verdict["reward_ok"], verdict
    assert len(service.asked) == 3 * STEPS
    [recorded] = stack.sql(
        "select count(extras) as n from event_log where kind = 'reward.scored'"
        " and session_id = any(%(ids)s)",
        ids=list(group.session_ids),
    )
    assert recorded["n"] == 3 * STEPS
