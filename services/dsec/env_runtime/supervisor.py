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
from pathlib import Path
from time import monotonic, monotonic_ns

import psutil
import uuid_utils

from dsec.env_runtime.child import Child
from dsec.env_runtime.death import Death
from dsec.env_runtime.memory import resident_bytes
from dsec.env_runtime.running import RunningSlot
from dsec.env_runtime.settings import EnvRuntimeSettings
from dsec.platform.bus import Bus
from dsec.platform.bus.retry import AWAY
from dsec.platform.cancellation import cancelled
from dsec.platform.clock import utc_now
from dsec.platform.user_environment import of_sessions
from dsec.platform.user_limits import kill_group
from dsec_contracts import WorkerHeartbeat, subjects
from dsec_contracts.worker import HeartbeatCircumstance, HeartbeatFact

log = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.1
MEMORY_PERIOD_S = 1.0
RESPAWN_PAUSE_S = 1.0
"""A worker that lived shorter than this waits as long before its successor starts."""
DEAD_SAID_S_MAX = 600.0
FENCED_LEAVES_S_MAX = 3.0


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
            death = child.death(code)
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
                child.check_deadline()
                child.check_processes(self._settings.user_processes_max)
            if now - last_memory >= MEMORY_PERIOD_S:
                last_memory = now
                for child in list(self._children.values()):
                    child.check_memory(self._settings.worker_memory_bytes_max)
            if now - last_beat >= self._settings.heartbeat_period_s:
                last_beat = now
                for child in list(self._children.values()):
                    if child.name in self._children:  # it may end while another is looked at
                        await self._vouch(child)
                        await self._check_fence(child, now)

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
        pid = child.process.pid
        # Another process may have the id of a dead one.
        memory_bytes = 0 if death else resident_bytes(pid) or 0
        told = HeartbeatCircumstance(pid=pid, memory_bytes=memory_bytes)
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
