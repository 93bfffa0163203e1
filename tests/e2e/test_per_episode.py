"""Rewards of whole episodes on the stack: scored from the log, whoever is killed on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsec.client.client import Client

pytestmark = pytest.mark.stack

SESSIONS, STEPS = 12, 150
REWARD = """
import dsec

@dsec.reward(weights={"length": 1.0, "lean": 10.0}, per="episode")
def whole(episode, services):
    assert [one.step for one in episode] == list(range(episode[0].step, episode[-1].step + 1))
    for one, following in zip(episode, episode[1:]):
        assert (one.next_observation == following.observation).all()
    return {"length": len(episode), "lean": abs(float(episode[-1].next_observation[2]))}

@dsec.reward(weights={"ends": 1.0}, per="episode")
def ends(episode, services):
    return {"ends": episode[-1].step}
"""


async def test_episodes_are_scored_whole_whoever_is_killed(
    client: Client, session_files: Callable[..., Path], good_agent: str, stack: Any, tmp_path: Path
) -> None:
    async def run(name: str, kill: bool) -> Any:
        session = session_files(
            good_agent,
            name=name,
            max_steps=STEPS,
            reward="reward.py:whole",
            files={"reward.py": REWARD},
        )
        group = await client.request(session, count=SESSIONS)
        ids = list(group.session_ids)
        for victims in (stack.workers, lambda: stack.processes("dsec.reward")) if kill else ():
            await asyncio.to_thread(
                stack.until,
                lambda: stack.sql(
                    "select count(*) as n from event_log where session_id = any(%(ids)s)"
                    " and kind = 'reward.scored'",
                    ids=ids,
                )[0]["n"],
            )
            for process in victims():
                process.kill()
        async with asyncio.timeout(90):
            rows = await client.wait(group)
        assert {(row.status, row.code) for row in rows} == {("completed", "max_steps")}, rows
        return group, {row.seed: (row.chain_hash, row.reward_total) for row in rows}

    undisturbed, expected = await run("undisturbed", kill=False)
    group, found = await run("killed", kill=True)
    assert found == expected

    # One reward an episode, at its last step; that of the episode that max_steps cut, too.
    trace = stack.sql(
        "select s.session_id, s.episode, count(*) as steps, max(s.step) as last,"
        " array_agg(r.step) filter (where r.reward is not null) as rewarded,"
        " count(r.missing) as missing"
        " from step_trace s left join reward_trace r using (session_id, step)"
        " where s.session_id = any(%(ids)s) group by s.session_id, s.episode",
        ids=list(group.session_ids),
    )
    assert len(trace) > 2 * SESSIONS
    for row in trace:
        assert (row["rewarded"], row["missing"]) == ([row["last"]], 0), row
    async for episode in client.episodes(undisturbed):
        length = len(episode.actions)
        assert episode.mask.tolist() == [False] * (length - 1) + [True]
        lean = abs(float(episode.observations[-1][2]))
        assert episode.rewards[-1] == pytest.approx(length + 10 * lean)

    for session_id in group.session_ids[:2]:
        verdict = await asyncio.to_thread(stack.dsec, "verify", str(session_id))
        assert (verdict["ok"], verdict["reward_ok"]) == (True, True), verdict

    file = tmp_path / "functions.py"
    file.write_text(REWARD)
    command = "rescore", "--group", group.group_id, "--reward", f"{file}:ends"
    told = await asyncio.to_thread(stack.dsec, *command)
    assert (told["sessions"], told["scored"], told["unscored"]) == (SESSIONS, len(trace), 0)
    anew = stack.sql(
        "select step, reward from reward_trace where session_id = any(%(ids)s) and revision = 2",
        ids=list(group.session_ids),
    )
    assert len(anew) == len(trace)
    assert all(row["reward"] == row["step"] for row in anew)
