"""A node's supervisor: starts workers, watches them, and says why they died.

It runs no user code. When a worker dies it reads from the shared memory whose code was running,
and says so in heartbeats, in the worker's name, until the scheduler has fenced it. After a SIGKILL
that it did not send, it is whose code has started processes that counts. A worker whose
user code blocks cannot beat; as long as its step is within its deadline, the supervisor beats for
it, and kills it afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, monotonic_ns

import psutil
import uuid_utils

from dsec.env_runtime.running import (
    EXIT_FENCED,
    EXIT_OUT_OF_MEMORY,
    Running,
    RunningSlot,
    Starter,
)
from dsec.env_runtime.settings import EnvRuntimeSettings
from dsec.platform.bus import Bus
from dsec.platform.bus.retry import AWAY
from dsec.platform.cancellation import cancelled
from dsec.platform.clock import utc_now
from dsec.platform.user_environment import of_sessions
from dsec.platform.user_limits import kill_group, started_by
from dsec_contracts import WorkerHeartbeat, subjects
from dsec_contracts.worker import Culprit, DeathReason, HeartbeatCircumstance, HeartbeatFact

log = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.1
MEMORY_PERIOD_S = 1.0
RESPAWN_PAUSE_S = 1.0
"""A worker that lived shorter than this waits as long before its successor starts."""
DEAD_SAID_S_MAX = 600.0
FENCED_LEAVES_S_MAX = 3.0


def oom_kills() -> int:
    """How many processes the system has killed for memory so far; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@dataclass(slots=True)
class Child:
    """A worker process."""

    name: str
    isolated: bool
    process: asyncio.subprocess.Process
    slot: RunningSlot
    began: float = field(default_factory=monotonic)
    oom_kills: int = field(default_factory=oom_kills)
    """Of the system, before it started."""
    killed_for: DeathReason | None = None
    fenced_at_s: float | None = None

    def starter(self) -> Starter | None:
        """Whose code has started a process in it, and how far that session was; where it shares its
        worker with others, how far it was when it did."""
        found = self.slot.starter()
        return replace(found, step=self.slot.last_step) if found and self.isolated else found


@dataclass(frozen=True, slots=True)
class Death:
    """Why a worker died, and whose code was running."""

    reason: DeathReason
    culprit: Culprit | None
    detail: str


def judge(
    code: int,
    running: Running | None,
    killed_for: DeathReason | None,
    *,
    out_of_memory: bool,
    starter: Starter | None = None,
) -> Death | None:
    """What an exit code and the shared memory say. None: nothing to report.

    Args:
        code: as `asyncio` gives it, negative for a signal.
        killed_for: why the supervisor killed the worker, if it did.
        out_of_memory: the worker said so, or the system killed somebody for memory meanwhile.
        starter: whose code has started a process in this worker, whoever's ran at the end.
    """
    if code == EXIT_FENCED:
        return None
    # No crash is a SIGKILL, and user code is kept from sending it: an operator did, or a machine
    # that is taken away. But what user code has started can, and nobody says who did.
    outside = code == -signal.SIGKILL and killed_for is None and not out_of_memory
    blamed: Running | Starter | None = running
    if outside and starter is not None:
        is_its_own = running is not None and running.session_id == starter.session_id
        blamed = running if is_its_own else starter
    culprit = (
        None
        if blamed is None
        else Culprit(session_id=blamed.session_id, step=blamed.step, suspect_only=outside or None)
    )
    if killed_for is not None:
        return Death(killed_for, culprit, f"killed: {killed_for}")
    if out_of_memory or code == EXIT_OUT_OF_MEMORY:
        return Death("oom", culprit, "no more memory")
    if code < 0:
        return Death("signal", culprit, f"signal {signal.Signals(-code).name}")
    if code == 0 and running is None:
        return Death("drained", None, "stopped in good order")
    return Death("exit", culprit, f"exit code {code}")


class Supervisor:
    """Keeps `workers` shared and `isolated_workers` isolated workers alive."""

    def __init__(
        self, settings: EnvRuntimeSettings, bus: Bus, environment: Mapping[str, str]
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._environment = of_sessions(environment)
        self._directory = Path(tempfile.mkdtemp(prefix="dsec-workers-"))
        self._children: dict[str, Child] = {}
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Supervise until `stop`, then stop the workers in good order."""
        s = self._settings
        kinds = [False] * s.workers + [True] * s.isolated_workers
        async with asyncio.TaskGroup() as group:
            keepers = [group.create_task(self._keep(isolated, group)) for isolated in kinds]
            watch = group.create_task(self._watch())
            await stop.wait()
            self._stopping = True
            for child in list(self._children.values()):
                with contextlib.suppress(ProcessLookupError):
                    child.process.terminate()
            _, late = await asyncio.wait(keepers, timeout=s.drain_wait_s + 2)
            for child in list(self._children.values()):
                kill_group(child.process.pid)
            if late:
                await asyncio.wait(late)
            watch.cancel()
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    async def _keep(self, isolated: bool, group: asyncio.TaskGroup) -> None:
        while not self._stopping:
            child = await self._start(isolated)
            self._children[child.name] = child
            code = await child.process.wait()
            kill_group(child.process.pid)  # what user code started and left
            del self._children[child.name]
            death = judge(
                code,
                child.slot.read(),
                child.killed_for,
                out_of_memory=child.slot.is_out_of_memory or oom_kills() > child.oom_kills,
                starter=child.starter(),
            )
            if child.fenced_at_s is not None:
                death = None
            child.slot.close(remove=True)
            log.warning("worker %s ended: %s", child.name, death or "it was fenced")
            if death is not None and not self._stopping:
                group.create_task(self._say_dead(child, death))
            elif death is not None:
                await self._say_dead_once(child, death)
            if not self._stopping and monotonic() - child.began < RESPAWN_PAUSE_S:
                await asyncio.sleep(RESPAWN_PAUSE_S)

    async def _start(self, isolated: bool) -> Child:
        # Unique for ever: a fence names a worker, and a name that comes back would be fenced too.
        name = "w" + uuid_utils.uuid7().hex
        path = self._directory / name
        slot = RunningSlot(path, self._settings.sessions_per_worker_max, create=True)
        arguments = ["--worker", name, "--slot", str(path), "--parent", str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dsec.env_runtime",
            *arguments,
            *(["--isolated"] if isolated else []),
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # with what user code starts, it is killed as one
        )
        assert process.stdin is not None
        process.stdin.write(f"{self._settings.model_dump_json()}\n".encode())
        process.stdin.close()
        log.info("worker %s started, pid %d", name, process.pid)
        return Child(name, isolated, process, slot)

    # -- watching ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        last_memory = last_beat = monotonic()
        while not cancelled():
            await asyncio.sleep(WATCH_PERIOD_S)
            now = monotonic()
            for child in list(self._children.values()):
                self._check_deadline(child)
                self._check_processes(child)
            if now - last_memory >= MEMORY_PERIOD_S:
                last_memory = now
                for child in list(self._children.values()):
                    self._check_memory(child)
            if now - last_beat >= self._settings.heartbeat_period_s:
                last_beat = now
                for child in list(self._children.values()):
                    if child.name in self._children:  # it may end while another is looked at
                        await self._vouch(child)
                        await self._check_fence(child, now)

    def _kill(self, child: Child, reason: DeathReason) -> None:
        if child.killed_for is None:
            child.killed_for = reason
            kill_group(child.process.pid)

    def _check_deadline(self, child: Child) -> None:
        running = child.slot.read()
        if running is None:
            return
        for_s = (monotonic_ns() - running.since_ns) / 1e9
        if for_s > running.step_deadline_s:
            log.warning("session %s: step %d takes %.1f s", running.session_id, running.step, for_s)
            self._kill(child, "step_deadline")

    def _check_processes(self, child: Child) -> None:
        count_max = self._settings.user_processes_max
        if started_by(child.process.pid, count_max) > count_max:
            log.warning("worker %s: its code runs over %d processes", child.name, count_max)
            self._kill(child, "signal")

    def _check_memory(self, child: Child) -> None:
        try:
            used = psutil.Process(child.process.pid).memory_info().rss
        except psutil.Error:
            return
        if used > self._settings.worker_memory_bytes_max:
            log.warning("worker %s uses %d bytes", child.name, used)
            self._kill(child, "oom")

    async def _check_fence(self, child: Child, now_s: float) -> None:
        """A fenced worker leaves by itself. One that is stopped, or that user code keeps from
        leaving, would hold its place for ever, and no other would be started."""
        if child.fenced_at_s is None:
            with contextlib.suppress(*AWAY):
                if await self._bus.last_sequence(subjects.fence(child.name)):
                    child.fenced_at_s = now_s
        elif now_s - child.fenced_at_s > FENCED_LEAVES_S_MAX:
            log.warning("worker %s was fenced and has not left: it is killed", child.name)
            kill_group(child.process.pid)

    async def _vouch(self, child: Child) -> None:
        """Beat for a worker that cannot, because user code runs. Not for a stopped process."""
        if child.slot.read() is None:
            return
        try:
            if psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED:
                return
        except psutil.Error:
            return
        await self._beat(child, None)

    # -- saying --------------------------------------------------------------------------------

    async def _say_dead(self, child: Child, death: Death) -> None:
        """Until it is fenced. Asked for, not listened to: a subscription for each worker that ever
        died would stay."""
        until = monotonic() + DEAD_SAID_S_MAX
        while monotonic() < until and not self._stopping:
            await self._say_dead_once(child, death)
            await asyncio.sleep(self._settings.heartbeat_period_s)
            with contextlib.suppress(*AWAY):
                if await self._bus.last_sequence(subjects.fence(child.name)):
                    return

    async def _say_dead_once(self, child: Child, death: Death) -> None:
        await self._beat(child, death)

    async def _beat(self, child: Child, death: Death | None) -> None:
        s = self._settings
        fact = HeartbeatFact(
            worker=child.name,
            node=s.node,
            state="dead" if death else "ready",
            lanes=[f"{child.name}-{n}" for n in range(s.lanes_per_worker)],
            capacity_sessions=1 if child.isolated else s.sessions_per_worker_max,
            isolated=child.isolated,
            death=death.reason if death else None,
            culprit=death.culprit if death else None,
            detail=death.detail if death else "",
        )
        told = HeartbeatCircumstance(pid=child.process.pid)
        await self._bus.publish_transient(
            WorkerHeartbeat(fact=fact, circumstance=told),
            child.name,
            source="dsec/env-runtime/supervisor",
            time=utc_now(),
            event_id=f"{child.name}.{fact.state}.{monotonic_ns()}",
        )


async def serve(settings: EnvRuntimeSettings) -> None:
    """Run a node until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    bus = await Bus.connect(settings.nats_url, f"env-runtime-{settings.node}")
    await bus.await_stream()
    await Supervisor(settings, bus, os.environ).run(stop)
    await bus.close()
