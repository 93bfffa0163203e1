"""Nodes and their workers: the real supervisor, whose workers are processes of the simulation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.simulation.bus import connect
from tests.simulation.clock import Process
from tests.simulation.log import Reader

from dsec.env_runtime import child, supervisor
from dsec.env_runtime.child import Child
from dsec.env_runtime.running import EXIT_FENCED, RunningSlot
from dsec.env_runtime.settings import EnvRuntimeSettings
from dsec.env_runtime.supervisor import Supervisor
from dsec.env_runtime.worker import Worker
from dsec.platform.bus import PublishRefused

if TYPE_CHECKING:
    from tests.simulation.world import World

KILLED = -9
NO_PID = 1 << 30
"""No process has it or a higher one, so that none can be asked or signalled by it."""
NODE = EnvRuntimeSettings.model_validate(
    {
        "workers": 2,
        "isolated_workers": 0,
        "lanes_per_worker": 2,
        "sessions_per_worker_max": 8,
        "heartbeat_period_s": 0.5,
        "reply_wait_s": 2.0,
        "worker_memory_bytes_max": 1 << 60,
    }
)


class WorkerHandle:
    """A worker process as its supervisor holds it."""

    def __init__(self, world: World, process: Process) -> None:
        self.pid = NO_PID + len(world.handles)
        world.handles[self.pid] = self
        self._process = process
        self._ended: asyncio.Future[int] = world.loop.create_future()
        self.code = KILLED
        """What it ends with, unless it says otherwise itself."""
        process.on_death.append(lambda: world.loop.later(0.001, self._end))

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(self.code)

    async def wait(self) -> int:
        """Its exit code."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.die()

    terminate = kill


class Node(Supervisor):
    """The supervisor of a node, whose workers are processes of the simulation."""

    world: World
    node: Process

    async def _start(self, isolated: bool) -> Child:
        world = self.world
        name = world.new_name("w")
        path = self._directory / name
        slot = RunningSlot(path, NODE.sessions_per_worker_max, create=True)
        process = Process(name, "worker")
        handle: Any = WorkerHandle(world, process)
        self.node.on_death.append(process.die)  # as `die_with_parent` sees to

        async def main() -> None:
            handle.code = 1
            handle.code = await worker(world, process, path, isolated)

        world.run(process, main())
        return Child(name, isolated, handle, slot, began=world.loop.time(), oom_kills=0)


async def node(world: World, process: Process) -> None:
    """A node: keeps workers alive."""
    bus = connect(world.network, process)
    await bus.await_stream()
    keeper = Node(NODE, bus, {})
    keeper.world, keeper.node = world, process
    world.folders.append(keeper._directory)
    await keeper.run(asyncio.Event())


async def worker(world: World, process: Process, slot: Path, isolated: bool) -> int:
    """A worker. Returns its exit code."""
    running = RunningSlot(slot, NODE.sessions_per_worker_max, create=False)
    bus = connect(world.network, process)
    reader = Reader(world.database, process)
    hosted = Worker(process.name, NODE, bus, reader, None, running, isolated=isolated)
    try:
        await hosted.run(asyncio.Event())
    except PublishRefused:
        return EXIT_FENCED
    finally:
        with contextlib.suppress(BufferError, ValueError):
            running.close()
    return 0


@contextlib.contextmanager
def pretended(handles: dict[int, WorkerHandle]) -> Iterator[None]:
    """What the supervisor asks of the system and does to its processes concerns those of a run."""
    ours: dict[str, Any] = {
        "kill_group": lambda pid: handles[pid].kill(),
        "started_by": lambda pid, count_max: 0,
        "oom_kills": lambda: 0,
    }
    where = [(m, name) for m in (supervisor, child) for name in ours if hasattr(m, name)]
    before = [(m, name, getattr(m, name)) for m, name in where]
    try:
        for module, name in where:
            setattr(module, name, ours[name])
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
