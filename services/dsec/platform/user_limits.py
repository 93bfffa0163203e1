"""Bounds of a process that runs user code: memory, files, cores, processes.

The kernel keeps all but the last. What it counts of processes is the user's, everywhere and threads
included: root is not bound at all, and in containers that share a user the others count too. So
that bound is a wall far out, against a bomb that outruns its watch, and `watch_processes` keeps the
real one: it counts what a process has started, whoever it runs as.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dsec.platform.cancellation import cancelled

log = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.1
WALL_PROCESSES = 1024
"""How far behind the bound the kernel's own lies."""
LINKS_OF_A_FOLDER = 2
"""Of an empty one. Each thread is a folder in its process's `task`."""


@dataclass(frozen=True, slots=True)
class UserLimits:
    """What user code may have in one process. `processes_max` is what that may start, and they in
    turn; `cpus_max` are the cores that it and they run on together, None for all."""

    memory_bytes_max: int
    open_files_max: int
    file_bytes_max: int
    processes_max: int
    cpus_max: int | None = None

    def argument(self) -> str:
        """For the command line of a process that calls `from_argument(…).apply()`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> UserLimits:
        """The reverse of `argument`."""
        return cls(**json.loads(text))

    def apply(self) -> None:
        """Bind this process, and whatever it will start. Nothing can undo it but root; but for the
        cores, which a process may take back."""
        _lower(resource.RLIMIT_CORE, 0)  # a dump would hold credentials
        _lower(resource.RLIMIT_NOFILE, self.open_files_max)
        _lower(resource.RLIMIT_FSIZE, self.file_bytes_max)
        if sys.platform == "linux":
            _lower(resource.RLIMIT_DATA, self.memory_bytes_max)
            _build_wall(_own_threads() + self.processes_max + WALL_PROCESSES)
            if self.cpus_max is not None:
                _hold_to_cores(self.cpus_max)


def _lower(which: int, limit: int) -> None:
    hard = resource.getrlimit(which)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (limit, limit))


def _hold_to_cores(cpus_max: int) -> None:
    """Of those that this process has, and what it starts inherits; others begin at other ones."""
    cores = sorted(os.sched_getaffinity(0))
    first = os.getpid() % len(cores)
    os.sched_setaffinity(0, (cores[first:] + cores[:first])[:cpus_max])


def _build_wall(threads_max: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and soft <= threads_max:
        return
    resource.setrlimit(resource.RLIMIT_NPROC, (threads_max, hard))
    try:
        probe = threading.Thread(target=int)
        probe.start()
        probe.join()
    except RuntimeError:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
        log.warning("others of this user run too many processes to bound ours by the kernel")


def _own_threads() -> int:
    """The threads of this user that can be seen from here."""
    count, user = 0, os.geteuid()
    for process in os.scandir("/proc"):
        if process.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                tasks = os.stat(f"/proc/{process.name}/task")
                if tasks.st_uid == user:
                    count += tasks.st_nlink - LINKS_OF_A_FOLDER
    return count


def started_by(pid: int, count_max: int) -> int:
    """How many processes one has started that have not ended, with those they have; no more than
    one above `count_max` are counted. 0 where the system does not say."""
    return sum(1 for _ in zip(_below(pid), range(count_max + 1), strict=False))


def processes_below(pid: int) -> list[int]:
    """The processes that one has started and that have not ended, with those they have."""
    return list(_below(pid))


def _below(pid: int) -> Iterator[int]:
    look_at = [pid]
    while look_at:
        children = _children(look_at.pop())
        yield from children
        look_at += children


def _children(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for one in threads for child in (one / "children").read_text().split()]
    except OSError:
        return []  # it has ended


def kill_group(pid: int) -> None:
    """Kill a process that leads a group, and all that is in it, at once: none can start another."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def watch_processes(pid: int, processes_max: int, on_over: Callable[[], None]) -> None:
    """Until cancelled, call `on_over` when a process has started too many."""
    while not cancelled():
        await asyncio.sleep(WATCH_PERIOD_S)
        if started_by(pid, processes_max) > processes_max:
            log.error("process %d has started more than %d others", pid, processes_max)
            on_over()
