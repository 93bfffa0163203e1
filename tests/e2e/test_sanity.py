"""Provenance on the whole stack: the evaluator's event, its view, and the command agree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsec.client.client import Client

pytestmark = pytest.mark.stack

STEPS = 6
AGENT = """
class Agent:
    def __init__(self, session_config):
        self.n = -1

    def step(self, observation):
        self.n += 1
        said = {"reasoning": "it leans", "confidence": 0.95}
        if self.n == 3:
            said["tool_call_id"] = "call_0_0_0"
        return {"action": self.n % 2, **({"provenance": said} if self.n % 2 else {})}
"""


async def test_what_an_agent_says_is_held_against_what_happened(
    client: Client, session_files: Callable[..., Path], good_agent: str, stack: Any
) -> None:
    silent = await client.request(session_files(good_agent, max_steps=STEPS, name="silent"))
    group = await client.request(session_files(AGENT, max_steps=STEPS, name="says"), count=2)
    await client.wait(group, timeout_s=60)
    await client.wait(silent, timeout_s=60)

    def checked() -> list[dict[str, Any]]:
        return stack.sql(
            "select * from policy_sanity where session_id = any(%(ids)s)",
            ids=[*group.session_ids, *silent.session_ids],
        )

    found = stack.until(lambda: rows if len(rows := checked()) >= 2 else None)
    assert {row["session_id"] for row in found} == set(group.session_ids)
    for row in found:
        assert (row["steps"], row["with_provenance"], row["unknown_tool_calls"]) == (STEPS, 3, 1)
        assert row["unknown_calls"] == [{"step": 3, "tool_call_id": "call_0_0_0"}]
        assert row["confident"][9] == 3
        [edge] = stack.sql(
            "select cause from causal_edge where session_id = %(id)s"
            " and kind = 'policy.sanity_checked'",
            id=row["session_id"],
        )
        assert edge["cause"] == f"{row['session_id']}/ended"

    command = "policy-sanity-check", "--group", group.group_id
    found = await asyncio.to_thread(stack.dsec, *command, exit_code=1)
    [told] = found["agents"]
    assert (told["sessions"], told["steps"], told["provenance_share"]) == (2, 2 * STEPS, 0.5)
    assert told["unknown_tool_calls_total"] == 2
    assert told["tool_calls"] == 0
