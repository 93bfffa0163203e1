"""A killed, stopped or fenced process costs time and changes nothing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsec.client.client import Client

pytestmark = pytest.mark.stack

SESSIONS = 20
STEPS = 600

_undisturbed: dict[int, str] = {}
"""Chains by seed of the run that nobody disturbs, made once for all tests."""


async def _chains(
    client: Client, stack: Any, session: Path, disturb: Callable[[], Any] | None
) -> tuple[dict[int, str], int]:
    """Chains by seed, and the most placements that a session took."""
    group = await client.request(session, count=SESSIONS)
    if disturb is not None:

        def half_way() -> bool:
            [row] = stack.sql(
                "select count(*) as n from event_log where kind = 'session.stepped' "
                "and step = %(step)s and session_id = any(%(ids)s)",
                step=STEPS // 4,
                ids=list(group.session_ids),
            )
            return bool(row["n"])

        await asyncio.to_thread(stack.until, half_way, 60, 0.5)
        [live] = stack.sql(
            "select count(*) as n from event_log where kind = 'session.ended' "
            "and session_id = any(%(ids)s)",
            ids=list(group.session_ids),
        )
        assert live["n"] == 0, "every session must be live when the fault comes"
        await asyncio.to_thread(disturb)
    async with asyncio.timeout(100):
        rows = await client.wait(group)
    assert {row.status for row in rows} == {"completed"}, rows
    return {row.seed: row.chain_hash for row in rows}, max(row.attempts for row in rows)


@pytest.fixture
async def undisturbed(
    client: Client, stack: Any, session_files: Callable[..., Path], good_agent: str
) -> tuple[Path, dict[int, str]]:
    """A session file and the chains of a run that nobody disturbs."""
    session = session_files(good_agent, max_steps=STEPS)
    if not _undisturbed:
        chains, _ = await _chains(client, stack, session, None)
        _undisturbed.update(chains)
    return session, _undisturbed


def _kill(processes: list[psutil.Process]) -> None:
    assert processes
    for process in processes:
        process.kill()


async def test_a_killed_worker(
    stack: Any, client: Client, undisturbed: tuple[Path, dict[int, str]]
) -> None:
    session, chains = undisturbed
    found, attempts = await _chains(client, stack, session, lambda: _kill(stack.workers()))
    assert found == chains
    assert attempts > 1, "the kill must have hit live sessions"


async def test_a_worker_that_is_told_to_stop_hands_its_sessions_back(
    stack: Any, client: Client, undisturbed: tuple[Path, dict[int, str]]
) -> None:
    session, chains = undisturbed

    def terminate() -> None:
        for process in stack.workers():
            process.terminate()

    found, attempts = await _chains(client, stack, session, terminate)
    assert found == chains
    assert attempts > 1
    assert stack.sql("select 1 from event_log where kind = 'session.released'")


@pytest.mark.parametrize("service", ["dsec.scheduler", "dsec.reward", "dsec.recorder"])
async def test_a_killed_service(
    stack: Any, client: Client, undisturbed: tuple[Path, dict[int, str]], service: str
) -> None:
    session, chains = undisturbed
    found, _ = await _chains(client, stack, session, lambda: _kill(stack.processes(service)))
    assert found == chains


async def test_a_killed_database_ends_nobody_who_waits(
    stack: Any, client: Client, undisturbed: tuple[Path, dict[int, str]]
) -> None:
    session, chains = undisturbed
    group = await client.request(session, count=SESSIONS)
    waiting = asyncio.create_task(client.wait(group, timeout_s=100))
    await asyncio.sleep(1)
    assert not waiting.done()
    _kill(stack.processes("-D"))
    assert {row.seed: row.chain_hash for row in await waiting} == chains


async def test_a_zombie_worker_is_fenced(
    stack: Any, client: Client, undisturbed: tuple[Path, dict[int, str]]
) -> None:
    session, chains = undisturbed
    stopped: list[psutil.Process] = []

    def stop() -> None:
        stopped.extend(stack.workers())
        fenced_before = len(stack.sql("select 1 from event_log where kind = 'worker.fenced'"))
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        stack.until(
            lambda: (
                len(stack.sql("select 1 from event_log where kind = 'worker.fenced'"))
                > fenced_before
            ),
            timeout_s=60,
        )
        for process in stopped:  # it wakes up and publishes, which is refused
            process.send_signal(signal.SIGCONT)

    found, attempts = await _chains(client, stack, session, stop)
    assert found == chains
    assert attempts > 1
    for process in stopped:
        stack.until(lambda process=process: not process.is_running(), timeout_s=60)
    assert not stack.sql("select 1 from event_aside where verdict = 'conflict'")


async def test_nothing_is_lost_or_doubled(stack: Any) -> None:
    """Over all that ran here: every ended session has each step once, and of each the first reward,
    or that it is missing, unless that is one for a whole episode."""
    broken = stack.sql(
        """
        select session_id, ended.steps, count(*) filter (where kind = 'session.stepped') as stepped,
               count(distinct step) filter (
                   where key like 'reward:%%.1' or kind = 'reward.missing') as told
        from event_log
        join (select session_id, (fact_json ->> 'steps')::int as steps from event_log
              where kind = 'session.ended' and fact_json ->> 'status' = 'completed') ended
        using (session_id)
        where session_id not in (
            select r.session_id from event_log r
            join event_log s on s.key = 'spec:' || (r.fact_json ->> 'reward_fn_hash')
            where r.kind = 'session.requested' and s.circumstance ->> 'per_episode' = 'true')
        group by 1, 2
        having count(*) filter (where kind = 'session.stepped') <> ended.steps
            or count(distinct step) filter (
                where key like 'reward:%%.1' or kind = 'reward.missing') <> ended.steps
        """
    )
    assert broken == []
    assert not stack.sql("select 1 from event_aside where verdict = 'conflict'")
