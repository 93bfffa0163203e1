"""Ended sessions are scored anew on the whole stack: a revision beside what the agent was given."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.reward.http_service import Answer, Asked, http_service

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

@dsec.reward(per="episode")
def whole(episode, services):
    return len(episode)
"""


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
    anew = partial(asyncio.to_thread, stack.dsec, "rescore", "--group", group.group_id, "--reward")
    told = await anew(f"{file}:leaning")
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
    verdict = await asyncio.to_thread(stack.dsec, "verify", str(group.session_ids[0]))
    assert (verdict["ok"], verdict["reward_ok"]) == (True, True), verdict
    assert [s.chain_hash for s in await client.queries.summaries(group.session_ids)] == [
        s.chain_hash for s in summaries
    ]

    told = await anew(f"{file}:picky", exit_code=1)
    assert (told["revision"], told["scored"], told["unscored"]) == (3, 3 * (STEPS - 1), 3)
    assert "ValueError: not this one" in told["first_failure"]
    rows = stack.sql(
        "select revision, reward from reward_trace where session_id = %(id)s and step = 70"
        " order by revision",
        id=group.session_ids[0],
    )
    assert [row["revision"] for row in rows] == [1, 2]

    # The rewards of steps would count beside those of their episodes.
    before = told["mean_reward_total"]
    told = await anew(f"{file}:whole", exit_code=1)
    assert (told["scored"], set(told["refused"].values())) == (0, {"rewarded_by_step"})
    assert "step 0 has a reward of its own" in told["first_failure"]
    assert told["mean_reward_total"] == before


async def test_of_two_at_once_each_has_a_revision_of_its_own(
    stack: Any, client: Client, session_files: Callable[..., Path], good_agent: str, tmp_path: Path
) -> None:
    group = await client.request(session_files(good_agent, max_steps=5, name="both"), count=30)
    await client.wait(group, timeout_s=60)
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    named = [await client.register("reward", f"{file}:{name}") for name in ("leaning", "picky")]
    ids = group.session_ids
    async with stack.client() as other:
        # They meet in the middle, from both ends.
        found = await asyncio.gather(
            rescore(client, ids[:20], named[0], timeout_s=60),
            rescore(other, ids[:9:-1], named[1], timeout_s=60),
        )
    numbers = [{one.revision for one in sessions} for sessions in found]
    assert [len(several) for several in numbers] == [1, 1]
    assert {(one.scored, one.code) for sessions in found for one in sessions} == {(5, "")}
    [[one], [another]] = numbers
    assert one != another
    for row in stack.sql(
        "select session_id, split_part(key, ':', 2)::int as revision,"
        " fact_json->>'reward_fn_hash' as hash from event_log"
        " where kind = 'reward.rescored' and session_id = any(%(ids)s)",
        ids=list(ids),
    ):
        if row["revision"] in (one, another):  # not one of a try that was in the other's way
            assert row["hash"] == named[row["revision"] == another]


ASKING = """
import dsec

@dsec.reward(weights={"left": 1.0}, services=["shelf"])
async def score(t, services):
    found = await services["shelf"].get("/left", params={"step": t.step})
    return {"left": found.json()["left"]}
"""
GONE = (3, 4)
"""Steps about which the service says nothing at first."""


async def test_a_reward_that_was_missing_is_filled_later(
    client: Client, session_files: Callable[..., Path], good_agent: str, stack: Any, tmp_path: Path
) -> None:
    steps, is_down = 8, True

    async def left(asked: Asked) -> Answer:
        step = int(asked.params["step"])
        return Answer(503) if is_down and step in GONE else Answer(body={"left": step + 0.5})

    async with http_service() as service:
        service.behave = left
        declared = tmp_path / "services.yaml"
        declared.write_text(
            f"shelf:\n  base_url: {service.url}\n  qps_budget: 200\n  retry: {{attempts_max: 1}}\n"
        )
        await asyncio.to_thread(stack.dsec, "services", "declare", str(declared))
        session = session_files(
            good_agent, max_steps=steps, reward="reward.py:score", files={"reward.py": ASKING}
        )
        group = await client.request(session)
        [row] = await client.wait(group, timeout_s=60)
        assert (row.status, row.rewards_missing) == ("completed", len(GONE)), row
        assert row.reward_total == sum(n + 0.5 for n in range(steps) if n not in GONE)
        before = await client.position()
        asked, is_down = len(service.asked), False

        reward = f"{session.parent / 'reward.py'}:score"
        chosen = "--group", group.group_id, "--reward", reward
        told = await asyncio.to_thread(stack.dsec, "rescore", *chosen)
        assert (told["scored"], told["unscored"]) == (steps, 0)
        assert len(service.asked) == asked + len(GONE), "what was answered once is not asked again"

    def rewards(episodes: list[Any]) -> list[tuple[float | None, bool]]:
        return [
            (float(value) if known else None, bool(known))
            for one in episodes
            for value, known in zip(one.rewards, one.mask, strict=True)
        ]

    full = [(n + 0.5, True) for n in range(steps)]
    now = [episode async for episode in client.episodes(group)]
    then = [episode async for episode in client.episodes(group, as_of=before)]
    assert rewards(now) == full
    assert rewards(then) == [one if n not in GONE else (None, False) for n, one in enumerate(full)]
    [filled] = await client.queries.summaries(group.session_ids)
    assert (filled.rewards_missing, filled.reward_total) == (0, sum(value for value, _ in full))
    assert filled.chain_hash == row.chain_hash, "what the agent was told stays what it was"
    verdict = await asyncio.to_thread(stack.dsec, "verify", str(row.session_id))
    assert (verdict["ok"], verdict["reward_ok"]) == (True, True), verdict
    trace = stack.sql(
        "select step, revision, missing from reward_trace where session_id = %(id)s"
        " and step = 3 order by revision nulls first",
        id=row.session_id,
    )
    assert [(one["revision"], one["missing"]) for one in trace] == [
        (None, "service_unavailable"),
        (2, None),
    ]


async def test_a_request_whose_acknowledgement_is_lost_is_made_once(
    client: Client,
    session_files: Callable[..., Path],
    good_agent: str,
    stack: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = await client.request(session_files(good_agent, max_steps=5, name="lost"), count=3)
    await client.wait(group, timeout_s=60)
    stream = (await client.bus())._js
    publish, lost = stream.publish, list[str]()

    async def losing(subject: str, data: bytes, headers: dict[str, str]) -> Any:
        acknowledgement = await publish(subject, data, headers=headers)
        if headers["ce-type"] == "reward.rescore_requested.v1" and subject not in lost:
            lost.append(subject)
            raise TimeoutError
        return acknowledgement

    reward = await client.register("reward", "env")
    monkeypatch.setattr(stream, "publish", losing)
    found = await rescore(client, group.session_ids, reward, timeout_s=60)
    assert len(lost) == 3
    assert [(one.revision, one.scored) for one in found] == [(2, 5)] * 3
    rows = stack.sql(
        "select key from event_log where kind = 'reward.rescore_requested'"
        " and session_id = any(%(ids)s)",
        ids=list(group.session_ids),
    )
    assert [row["key"] for row in rows] == ["rescore_requested:2"] * 3


STOCK = """
import dsec

@dsec.reward(services=["stock"])
async def left(t, services):
    found = await services["stock"].get("/left", params={"step": t.step})
    return found.json()["left"]
"""


@pytest.mark.long
async def test_a_replica_that_dies_while_it_scores_anew_loses_and_repeats_nothing(
    client: Client, session_files: Callable[..., Path], good_agent: str, stack: Any, tmp_path: Path
) -> None:
    """Of the first turn's 64 steps every other one is answered, of the second's none; the replica
    is killed. Of the next one's first turn 32 are answered, too: the first one's that were not.
    """
    died = asyncio.Event()

    async def left(asked: Asked) -> Answer:
        step = int(asked.params["step"])
        if not died.is_set() and step >= 64:
            return Answer(never=True)
        knows = not 64 <= step < 96 if died.is_set() else step % 2
        return Answer(body={"left": step} if knows else {})

    session = session_files(good_agent, max_steps=STEPS, name="dies")
    group = await client.request(session)
    await client.wait(group, timeout_s=60)
    file = tmp_path / "asking.py"
    file.write_text(STOCK)
    async with http_service() as service:
        service.behave = left
        declared = tmp_path / "services.yaml"
        declared.write_text(f"stock: {{base_url: '{service.url}', qps_budget: 500}}\n")
        await asyncio.to_thread(stack.dsec, "services", "declare", str(declared))
        reward = await client.register("reward", f"{file}:left")
        working = asyncio.create_task(rescore(client, group.session_ids, reward, timeout_s=60))
        count = "select count(*) as n from reward_trace where session_id = %(id)s and revision = 2"
        rows = partial(stack.sql, count, id=group.session_ids[0])
        await asyncio.to_thread(stack.until, lambda: rows()[0]["n"] == 32)
        [replica] = stack.processes("-m", "dsec.reward")
        replica.send_signal(signal.SIGKILL)
        died.set()
        [found] = await working
    assert (found.scored, found.unscored) == (STEPS - 32, 32)
    [trace] = stack.sql(
        "select count(*) as n, sum(reward) as total from reward_trace"
        " where session_id = %(id)s and revision = 2",
        id=group.session_ids[0],
    )
    assert (trace["n"], trace["total"]) == (STEPS - 32, sum(range(STEPS)) - sum(range(64, 96)))
    asked = [int(one.params["step"]) for one in service.asked]
    assert max(map(asked.count, range(1, 64, 2))) == 1


@pytest.mark.long
async def test_three_hundred_sessions_are_scored_anew(
    client: Client, session_files: Callable[..., Path], good_agent: str, stack: Any, tmp_path: Path
) -> None:
    sessions, steps = 300, 60
    session = session_files(good_agent, max_steps=steps, name="many")
    group = await client.request(session, count=sessions)
    before = {row.session_id: row for row in await client.wait(group, timeout_s=120)}
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    command = "rescore", "--group", group.group_id, "--reward", f"{file}:leaning"
    told = await asyncio.to_thread(stack.dsec, *command, timeout_s=300.0)
    assert (told["revision"], told["sessions"]) == (2, sessions)
    assert (told["scored"], told["unscored"]) == (sessions * steps, 0)
    [counted] = stack.sql(
        "select count(*) as n, count(distinct session_id) as sessions from reward_trace"
        " where session_id = any(%(ids)s) and revision = 2",
        ids=list(group.session_ids),
    )
    assert (counted["n"], counted["sessions"]) == (sessions * steps, sessions)
    after = await client.queries.summaries(group.session_ids)
    assert {row.session_id: row.chain_hash for row in after} == {
        session_id: row.chain_hash for session_id, row in before.items()
    }


async def test_what_cannot_be_scored_anew_says_why(
    client: Client, session_files: Callable[..., Path], good_agent: str, stack: Any
) -> None:
    running = await client.request(session_files(good_agent, max_steps=10**7, name="runs"))
    async with asyncio.timeout(60):
        while not (await client.queries.summaries(running.session_ids))[0].steps:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    reward = await client.register("reward", "env")
    found = await rescore(client, running.session_ids, reward, timeout_s=60)
    assert [(one.scored, one.code) for one in found] == [(0, "not_ended")]
    query = "select 1 from reward_trace where reward is not null and session_id = %(id)s limit 1"
    await asyncio.to_thread(stack.until, lambda: stack.sql(query, id=running.session_ids[0]))
    await client.cancel(running.session_ids)
    await client.wait(running, timeout_s=60)
    again = await rescore(client, running.session_ids, reward, timeout_s=120)
    assert again[0].code == ""
    assert again[0].scored > 0
    assert again[0].revision == 3
