"""Processes of services that start at once: forked from one that has imported what they need.

Nearly all of what a replica takes to start is imports, a second of CPU, and the suite starts a
hundred. What is tested stays the same: a process with an environment, signals, memory and an end of
its own, that is killed like any other. Run as a script, this is the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

ORDER_BYTES_MAX = 1 << 17
"""An environment and arguments, in one message."""


class Forked:
    """A process that was forked by another one; as much of `subprocess.Popen` as tests use."""

    def __init__(self, told: int) -> None:
        self._told = open(told, "rb", buffering=0)  # noqa: SIM115 - open until it has ended
        self.returncode: int | None = None
        self.pid = int(self._line())

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._line())
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As `kill` does; nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """`kill`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """`kill -9`."""
        self.send_signal(signal.SIGKILL)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            more = self._told.read(1)
            assert more, "the process that forks is gone"
            line += more
        return line


def start(entry: str, *arguments: str, env: Mapping[str, str], log: Path | None = None) -> Forked:
    """Run the `main` of a module in a process of its own.

    Args:
        entry: the module's name, or the path of its file.
        log: a file for what it writes to stderr.
    """
    told, tell = os.pipe()
    order = json.dumps([arguments, dict(env), str(log) if log else None]).encode()
    assert len(order) <= ORDER_BYTES_MAX, "an environment without end"
    socket.send_fds(_forking(entry)[1], [order], [tell])
    os.close(tell)
    return Forked(told)


@cache
def _forking(entry: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process that forks those of a module. It ends with this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, __file__, str(its.fileno()), entry]
        process = subprocess.Popen(command, pass_fds=[its.fileno()])
    atexit.register(_end, process, ours)
    return process, ours


def _end(process: subprocess.Popen[bytes], orders: socket.socket) -> None:
    orders.close()
    process.wait()


def _module(entry: str) -> ModuleType:
    if not entry.endswith(".py"):
        return importlib.import_module(entry)
    spec = spec_from_file_location(Path(entry).stem, entry)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fork(orders: socket.socket) -> Any:
    """Fork until nobody orders any more. Returns the order in a process that was forked, None in
    this one."""
    running: dict[int, int] = {}
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready = select.select([orders, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _tell_of_ended(running)
        if orders not in ready:
            continue
        message, received, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 1)
        if not message:
            break
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)
            for each in (woken, wake, *running.values(), *received):
                os.close(each)
            orders.close()
            return json.loads(message)
        (running[pid],) = received
        os.write(running[pid], b"%d\n" % pid)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _tell_of_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        tell = running.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it
            os.write(tell, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(tell)


def _become(arguments: list[str], env: dict[str, str], log: str | None) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = arguments
    if log is not None:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())


if __name__ == "__main__":
    entry_module = _module(sys.argv[2])
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as given:
        order = _fork(given)
    if order is not None:
        _become(*order)
        sys.exit(entry_module.main())
