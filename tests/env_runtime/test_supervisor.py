"""What workers are told, and what their death is taken for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from time import monotonic_ns
from uuid import UUID

import psutil
import pytest
from tests.env_runtime.conftest import connected

from dsec.env_runtime import supervisor
from dsec.env_runtime.child import Child
from dsec.env_runtime.death import judge
from dsec.env_runtime.running import (
    EXIT_FENCED,
    EXIT_OUT_OF_MEMORY,
    Running,
    RunningSlot,
    Starter,
)
from dsec.env_runtime.settings import WORKERS_UNASKED_MAX, EnvRuntimeSettings
from dsec.env_runtime.supervisor import Supervisor
from dsec.platform.bus import Bus
from dsec.platform.settings import SettingsError
from dsec_contracts import WorkerHeartbeat, parse

SESSION = UUID("0192f0c1-2345-7abc-8def-0123456789ab")
RUNNING = Running(SESSION, 5, 0, 30.0)


@pytest.mark.parametrize(
    ("code", "running", "killed_for", "oom", "reason"),
    [
        (3, RUNNING, None, False, "exit"),
        (0, RUNNING, None, False, "exit"),  # os._exit(0) in user code is no good order
        (-signal.SIGSEGV, RUNNING, None, False, "signal"),
        (-signal.SIGKILL, RUNNING, "step_deadline", False, "step_deadline"),
        (-signal.SIGKILL, RUNNING, "oom", False, "oom"),
        (EXIT_OUT_OF_MEMORY, RUNNING, None, True, "oom"),
        (0, None, None, False, "drained"),
        (-signal.SIGKILL, None, None, False, "signal"),
    ],
)
def test_reasons(
    code: int, running: Running | None, killed_for: str | None, oom: bool, reason: str
) -> None:
    death = judge(code, running, killed_for, out_of_memory=oom)  # type: ignore[arg-type]
    assert death is not None
    assert death.reason == reason
    if running is None:
        assert death.culprit is None
    else:
        assert death.culprit is not None
        assert (death.culprit.session_id, death.culprit.step) == (SESSION, 5)


@pytest.mark.parametrize(
    ("code", "killed_for", "oom", "suspect_only"),
    [
        (-signal.SIGKILL, None, False, True),
        (-signal.SIGKILL, None, True, None),
        (-signal.SIGKILL, "step_deadline", False, None),
        (-signal.SIGSEGV, None, False, None),
        (3, None, False, None),
    ],
)
def test_who_is_killed_from_outside_is_only_suspected(
    code: int, killed_for: str | None, oom: bool, suspect_only: bool | None
) -> None:
    death = judge(code, RUNNING, killed_for, out_of_memory=oom)  # type: ignore[arg-type]
    assert death is not None
    assert death.culprit is not None
    assert death.culprit.suspect_only is suspect_only


STARTER = Starter(UUID("0192f0c1-2345-7abc-8def-0123456789ff"), 2)


@pytest.mark.parametrize(
    ("code", "running", "killed_for", "blamed"),
    [
        (-signal.SIGKILL, None, None, STARTER),
        (-signal.SIGKILL, RUNNING, None, STARTER),  # it came from what another one had started
        (-signal.SIGKILL, RUNNING, "step_deadline", RUNNING),
        (-signal.SIGSEGV, RUNNING, None, RUNNING),
        (-signal.SIGSEGV, None, None, None),
    ],
)
def test_after_a_kill_by_nobody_knows_whom_it_counts_who_has_started_processes(
    code: int,
    running: Running | None,
    killed_for: str | None,
    blamed: Running | Starter | None,
) -> None:
    death = judge(code, running, killed_for, out_of_memory=False, starter=STARTER)  # type: ignore[arg-type]
    assert death is not None
    found = death.culprit and (death.culprit.session_id, death.culprit.step)
    assert found == (blamed and (blamed.session_id, blamed.step))
    if blamed is STARTER:
        assert death.culprit is not None
        assert death.culprit.suspect_only


def test_of_a_session_that_is_alone_it_counts_how_far_it_was(tmp_path: Path) -> None:
    slot = RunningSlot(tmp_path / "slot", 4, create=True)
    slot.assign(1, SESSION, 30.0)
    for isolated, step in ((False, 2), (True, 9)):
        slot.enter(1, 2, 0)
        slot.note_start()
        slot.enter(1, 9, 0)
        slot.clear()
        child = Child("w", isolated, None, slot)  # type: ignore[arg-type]
        assert child.starter() == Starter(SESSION, step)
    slot.close()


def test_a_fenced_worker_is_no_news() -> None:
    assert judge(EXIT_FENCED, None, None, out_of_memory=False) is None


class Node:
    """A supervisor in this process, with one real worker, and who beat how."""

    def __init__(self, bus: Bus, settings: EnvRuntimeSettings, environment: Mapping[str, str]):
        self.bus = bus
        self.supervisor = Supervisor(settings, bus, environment)
        self.beats: list[tuple[str, WorkerHeartbeat]] = []
        self.stop = asyncio.Event()

    async def on_beat(self, headers: Mapping[str, str], data: bytes) -> None:
        event = parse(headers["ce-type"], data)
        assert isinstance(event, WorkerHeartbeat)
        self.beats.append((headers["ce-source"], event))

    async def beating(self) -> Child:
        """The worker, once it beats itself."""
        async with asyncio.timeout(60):
            while True:
                for name, child in self.supervisor._children.items():
                    if any(source.endswith(name) for source, _ in self.beats):
                        return child
                await asyncio.sleep(0.05)

    def deaths(self, worker: str) -> int:
        """How often the worker was said to be dead."""
        facts = [beat.fact for _, beat in self.beats if beat.fact.worker == worker]
        return sum(fact.state == "dead" for fact in facts)

    def said(self, state: str) -> list[WorkerHeartbeat]:
        """What the supervisor said of workers in a state."""
        own = [beat for source, beat in self.beats if source.endswith("/supervisor")]
        return [beat for beat in own if beat.fact.state == state]

    async def vouched(self) -> list[WorkerHeartbeat]:
        """What the supervisor said of a worker that it beats for, once it does."""
        async with asyncio.timeout(10):
            while not (found := self.said("ready")):  # noqa: ASYNC110 - others publish it
                await asyncio.sleep(0.02)
        return found

    async def died(self, worker: str, times: int = 1) -> None:
        """Wait until the worker was said to be dead so often."""
        async with asyncio.timeout(60):
            while self.deaths(worker) < times:  # noqa: ASYNC110 - others publish it
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(nats_url: str, environment: Mapping[str, str]) -> AsyncIterator[Node]:
    settings = EnvRuntimeSettings(
        nats_url=nats_url,
        database_url="postgresql://me:hidden@127.0.0.1:1/nobody",
        isolated_workers=0,
        heartbeat_period_s=0.1,
        log_level="WARNING",
    )
    async with connected(nats_url) as bus:
        node = Node(bus, settings, environment)
        await bus.listen("dsec.worker.heartbeat.*", node.on_beat)
        task = asyncio.create_task(node.supervisor.run(node.stop))
        try:
            yield node
        finally:
            node.stop.set()
            await asyncio.wait_for(task, 60)


@pytest.mark.nats
async def test_a_worker_knows_its_servers_and_user_code_finds_no_secret(nats_url: str) -> None:
    secrets = {
        "DSEC_NATS_URL": nats_url,
        "DSEC_DATABASE_URL": "postgresql://me:hidden@host/log",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "UPSTREAM": "amqp://me:hidden@host/",
    }
    async with running(nats_url, os.environ | secrets | {"PLAIN": "seen"}) as node:
        child = await node.beating()  # so it has found the bus
        process = psutil.Process(child.process.pid)
        environment = process.environ()
        assert not secrets.keys() & environment.keys()
        assert environment["PLAIN"] == "seen"
        for told in (*environment.values(), *process.cmdline()):
            assert "hidden" not in told
            assert nats_url not in told


@pytest.mark.nats
async def test_who_beats_for_a_busy_worker_tells_its_memory_and_of_a_dead_one_none(
    nats_url: str,
) -> None:
    async with running(nats_url, os.environ) as node:
        child = await node.beating()
        there = psutil.Process(child.process.pid).memory_info().rss
        child.slot.assign(0, UUID(int=1), 60.0)
        child.slot.enter(0, 0, monotonic_ns())
        [said, *_] = await node.vouched()
        assert 0.5 * there < said.circumstance.memory_bytes < 2 * there
        child.process.kill()
        await node.died(child.name)
        assert {beat.circumstance.memory_bytes for beat in node.said("dead")} == {0}


@pytest.mark.nats
async def test_a_dead_worker_is_said_to_be_dead_until_it_is_fenced(nats_url: str) -> None:
    async with running(nats_url, os.environ) as node:
        child = await node.beating()
        subscriptions = len(node.bus._nc._subs)
        child.process.kill()
        await node.died(child.name, times=3)
        await node.bus.fence(child.name, "test")
        async with asyncio.timeout(60):
            said = 0
            while (now := node.deaths(child.name)) != said:  # it hears of the fence
                said = now
                await asyncio.sleep(0.5)
        assert len(node.bus._nc._subs) == subscriptions  # a worker that died leaves none behind


@pytest.mark.nats
async def test_a_node_stops_though_nobody_has_fenced_its_dead_worker(nats_url: str) -> None:
    async with running(nats_url, os.environ) as node:
        child = await node.beating()
        child.process.kill()
        await node.died(child.name)
    # `running` waits for the end, and not for long


@pytest.mark.nats
async def test_a_fenced_worker_that_does_not_leave_is_killed_and_replaced(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FENCED_LEAVES_S_MAX", 0.3)
    async with running(nats_url, os.environ) as node:
        child = await node.beating()
        child.process.send_signal(signal.SIGSTOP)
        await node.bus.fence(child.name, "test")
        code = await asyncio.wait_for(child.process.wait(), 60)
        assert code == -signal.SIGKILL
        async with asyncio.timeout(60):
            await node.beating()  # another one
        assert not node.deaths(child.name)  # it was fenced: nobody needs to be told


def test_there_is_a_worker_for_each_core_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSEC_WORKERS", raising=False)
    for usable, expected in (({3}, 1), ({0, 5}, 2), (set(range(64)), WORKERS_UNASKED_MAX)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, usable=usable: usable)
        assert EnvRuntimeSettings().workers == expected
    monkeypatch.setenv("DSEC_WORKERS", "3")
    assert EnvRuntimeSettings().workers == 3


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DSEC_NODE", "host.example"),  # no name for a heartbeat
        ("DSEC_HEARTBEAT_PERIOD_S", "0"),
        ("DSEC_REPLY_WAIT_S", "0"),
        ("DSEC_TICK_SLICE_MS", "0"),
        ("DSEC_LANE_WAIT_MS", "-1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"^{variable}: "):
        EnvRuntimeSettings()
