"""Processes of services that start at once: forked from one that has imported what they need.

Nearly all of what a replica takes to start is imports, a second of CPU, and the suite starts a
hundred. What is tested stays the same: a process with an environment, signals, memory and an end of
its own, that is killed like any other. The process that forks is `multiprocessing`'s fork server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

ENTRIES = (
    "dsec.anchor_sync.__main__",
    "dsec.reward.__main__",
    "dsec.scheduler.__main__",
    "dsec.tool.__main__",
)
"""What the fork server imports; whatever else an entry needs, its own process imports. Not what
starts threads, as the recorder's pyarrow does: a process that is forked then may stand still."""
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(list(ENTRIES))


class Forked:
    """A process that was forked by another one; as much of `subprocess.Popen` as tests use."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        process.start()
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """`returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """As `kill` does; nothing if it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """`kill`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """`kill -9`."""
        self.send_signal(signal.SIGKILL)


def start(entry: str, *arguments: str, env: Mapping[str, str], log: Path | None = None) -> Forked:
    """Run the `main` of a module in a process of its own.

    Args:
        log: a file for what it writes to stderr.
    """
    told = (entry, arguments, dict(env), log)
    # A daemon: whatever a test leaves behind ends with the tests.
    return Forked(SERVER.Process(target=_become, args=told, daemon=True))


def _become(entry: str, arguments: tuple[str, ...], env: dict[str, str], log: Path | None) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = arguments
    if log is not None:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 2)
    sys.exit(import_module(entry).main())
