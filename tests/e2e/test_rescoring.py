"""Ended sessions are scored anew on the whole stack: a revision beside what the agent was given."""

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

from dsec.client.client import Client
from dsec.client.rescoring import rescore

pytestmark = pytest.mark.stack

STEPS = 150
FUNCTIONS = """
import dsec

@dsec.reward(weights={"leaning": 1.0, "gone": 10.0})
def leaning(t, services):
    return {"leaning": abs(float(t.observation[2])), "gone": float(t.terminated)}

@dsec.reward(weights={"sum": 1.0})
def picky(t, services):
    if t.step == 70:
        raise ValueError("not this one")
    return {"sum": float(t.step)}
"""


async def dsec(stack: Any, *arguments: str) -> Any:
    env = {**os.environ, "DSEC_STATE_DIR": str(stack.state_dir)}
    return await asyncio.to_thread(
        subprocess.run,
        [*DSEC, *arguments, "--json"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


async def test_sessions_are_scored_anew_and_the_old_batch_can_be_had_again(
    client: Client, session_files: Callable[..., Path], good_agent: str, stack: Any, tmp_path: Path
) -> None:
    session = session_files(good_agent, max_steps=STEPS, name="again")
    group = await client.request(session, count=3)
    summaries = await client.wait(group, timeout_s=60)
    before = await client.position()
    old = {e.session_id: e async for e in client.episodes(group) if e.episode == 0}

    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    done = await dsec(stack, "rescore", "--reward", f"{file}:leaning", "--group", group.group_id)
    assert done.returncode == 0, (done.stderr, done.stdout)
    told = json.loads(done.stdout)
    assert (told["revision"], told["sessions"], told["scored"]) == (2, 3, 3 * STEPS)
    assert told["unscored"] == 0
    assert told["mean_reward_total"] != told["mean_reward_total_before"]

    new = {e.session_id: e async for e in client.episodes(group) if e.episode == 0}
    for session_id, episode in new.items():
        angles = [abs(float(o[2])) for o in episode.observations[:-1]]
        gone = [0.0] * (len(angles) - 1) + [10.0 * episode.terminated]
        expected = [angle + end for angle, end in zip(angles, gone, strict=True)]
        assert episode.rewards.tolist() == pytest.approx(expected)
        assert episode.components[0] == {"leaning": (angles[0], 1.0), "gone": (0.0, 10.0)}
        assert episode.rewards.tolist() != old[session_id].rewards.tolist()
    # As of the position before, the batch is what it was.
    async for episode in client.episodes(group, as_of=before):
        if episode.episode == 0:
            assert episode.rewards.tolist() == old[episode.session_id].rewards.tolist()
            assert episode.mask.all()
    # What the sessions were is not touched: they verify, rewards included.
    verified = await dsec(stack, "verify", str(group.session_ids[0]))
    verdict = json.loads(verified.stdout)
    assert (verdict["ok"], verdict["reward_ok"]) == (True, True), verdict
    assert [s.chain_hash for s in await client.queries.summaries(group.session_ids)] == [
        s.chain_hash for s in summaries
    ]

    partly = await dsec(stack, "rescore", "--reward", f"{file}:picky", "--group", group.group_id)
    assert partly.returncode == 1
    told = json.loads(partly.stdout)
    assert (told["revision"], told["scored"], told["unscored"]) == (3, 3 * (STEPS - 1), 3)
    assert "ValueError: not this one" in told["first_failure"]
    rows = stack.sql(
        "select revision, reward from reward_trace where session_id = %(id)s and step = 70"
        " order by revision",
        id=group.session_ids[0],
    )
    assert [row["revision"] for row in rows] == [1, 2]


async def test_what_cannot_be_scored_anew_says_why(
    client: Client, session_files: Callable[..., Path], good_agent: str
) -> None:
    running = await client.request(session_files(good_agent, max_steps=10**7, name="runs"))
    reward = await client.register("reward", "env")
    found = await rescore(client, running.session_ids, reward, timeout_s=60)
    assert [(one.scored, one.code) for one in found] == [(0, "not_ended")]
    await client.cancel(running.session_ids)
    await client.wait(running, timeout_s=60)
    again = await rescore(client, running.session_ids, reward, timeout_s=120)
    assert again[0].code == ""
    assert again[0].scored > 0
    assert again[0].revision == 3
