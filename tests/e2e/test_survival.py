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

SESSIONS = 60
STEPS = 1500


async def _chains(client: Client, session: Path, disturb: Callable[[], Any]) -> dict[int, str]:
    group = await client.request(session, count=SESSIONS)
    await asyncio.sleep(1.5)
    await asyncio.to_thread(disturb)
    async with asyncio.timeout(90):
        rows = await client.wait(group)
    assert {row.status for row in rows} == {"completed"}, rows
    return {row.seed: row.chain_hash for row in rows}


@pytest.fixture
async def undisturbed(
    client: Client, session_files: Callable[..., Path], good_agent: str
) -> tuple[Path, dict[int, str]]:
    """A session file and the chains of a run that nobody disturbs."""
    session = session_files(good_agent, max_steps=STEPS)
    return session, await _chains(client, session, lambda: None)


def _kill(processes: list[psutil.Process]) -> None:
    assert processes
    for process in processes:
        process.kill()


def _attempts(stack: Any) -> int:
    [row] = stack.sql("select max(attempt) as most from event_log where kind = 'session.placed'")
    return int(row["most"])


async def test_a_killed_worker(
    stack: Any, client: Client, undisturbed: tuple[Path, dict[int, str]]
) -> None:
    session, chains = undisturbed
    before = _attempts(stack)
    assert await _chains(client, session, lambda: _kill(stack.workers())) == chains
    assert _attempts(stack) > 1 or before > 1


@pytest.mark.parametrize("service", ["dsec.scheduler", "dsec.reward", "dsec.recorder"])
async def test_a_killed_service(
    stack: Any, client: Client, undisturbed: tuple[Path, dict[int, str]], service: str
) -> None:
    session, chains = undisturbed
    assert await _chains(client, session, lambda: _kill(stack.processes(service))) == chains


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
            timeout_s=20,
        )
        for process in stopped:  # it wakes up and publishes, which is refused
            process.send_signal(signal.SIGCONT)

    assert await _chains(client, session, stop) == chains
    for process in stopped:
        stack.until(lambda process=process: not process.is_running(), timeout_s=30)
    assert not stack.sql("select 1 from event_aside where verdict = 'conflict'")


async def test_nothing_is_lost_or_doubled(stack: Any) -> None:
    """Over all of the above: every ended session has each step and each reward once."""
    broken = stack.sql(
        """
        select session_id, ended.steps, count(*) filter (where kind = 'session.stepped') as stepped,
               count(*) filter (where kind = 'reward.scored') as scored
        from event_log
        join (select session_id, (fact_json ->> 'steps')::int as steps from event_log
              where kind = 'session.ended' and fact_json ->> 'status' = 'completed') ended
        using (session_id)
        group by 1, 2
        having count(*) filter (where kind = 'session.stepped') <> ended.steps
            or count(*) filter (where kind = 'reward.scored') <> ended.steps
        """
    )
    assert broken == []
