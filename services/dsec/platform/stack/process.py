"""One child process: started, awaited until ready, stopped, and never left behind.

The stack runs servers and services that are not ours to trust: they may hang at start, ignore
SIGTERM, or outlive a supervisor that was killed. So every child has a log file and a session of
its own, is told by the kernel to die with its supervisor (Linux), is ready within a bound or is
stopped, and is known by pid *and* creation time, since a bare pid may belong to somebody else by
the time it is used.

Children are watched by polling. That costs next to nothing for the dozen there are, works on
every POSIX system, and ties no child to an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tenacity

from dsec.platform.parent import PR_SET_PDEATHSIG
from dsec.platform.stack.errors import DISK_FULL_TEXT, StackError, disk_full, os_failure
from dsec.platform.stack.identity import ProcessIdentity, descendants, kill_remaining

EXIT_POLL_S = 0.05
READY_POLL_S = 0.02
READY_WITHIN_S = 60.0
STOP_GRACE_S = 20.0
KILL_WAIT_S = 10.0
RUN_WITHIN_S = 120.0
LOG_BYTES_MAX = 16 * 1024 * 1024
LOG_TAIL_BYTES = 4096

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(frozen=True)
class ProcessSpec:
    """How to start, probe and stop one process.

    `ready` is asked until it says yes; None means ready once started. `death_signal` is what the
    kernel sends when the supervisor dies. `ailment` is asked now and then while it runs: a sentence
    where only a new start helps. `user_id` starts the process as another user, `root` with that
    folder as its `/`; both need root.
    """

    name: str
    argv: tuple[str, ...]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ready: Callable[[], Awaitable[bool]] | None = None
    ready_within_s: float = READY_WITHIN_S
    ailment: Callable[[], str | None] | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_grace_s: float = STOP_GRACE_S
    death_signal: signal.Signals = signal.SIGKILL
    user_id: int | None = None
    root: Path | None = None


class ChildProcess:
    """A started process. Its methods may be called again at any time; each is safe to repeat."""

    def __init__(self, spec: ProcessSpec) -> None:
        """Start the process; raise StackError when the system refuses."""
        self.spec = spec
        _require_main_thread(spec.name)
        self._log_offset_bytes = 0
        try:
            log = self._open_log()
        except OSError as error:
            raise os_failure(spec.log_path, f"opening the log of {spec.name}", error) from error
        try:
            self._popen = _spawn(spec, log)
        except OSError as error:
            raise StackError(
                f"{spec.name} cannot be started from {spec.argv[0]} "
                f"({error.strerror or error}): check that the file is there and executable."
            ) from error
        finally:
            os.close(log)
        self.identity = ProcessIdentity.of(self._popen.pid)

    def _open_log(self) -> int:
        path = self.spec.log_path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > LOG_BYTES_MAX:
                path.replace(path.with_name(path.name + ".1"))
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._log_offset_bytes = os.fstat(log).st_size
        return log

    @property
    def returncode(self) -> int | None:
        """Exit status (negative: the signal) once `exited` was True, otherwise None."""
        return self._popen.returncode

    def exited(self) -> bool:
        """Whether the process has ended. What it left in its process group is killed."""
        if self._popen.returncode is not None:
            return True
        if sys.platform == "linux":
            # Look without reaping: as long as the zombie stands, nobody else can get its pid,
            # so the signal to its group cannot reach a stranger.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, self._popen.pid, options) is None:
                    return False
                self._signal_group(signal.SIGKILL)
        return self._popen.poll() is not None

    async def wait_exit(self) -> int:
        """Wait until the process ends; return its exit status."""
        while not self.exited():  # noqa: ASYNC110 - the system has to be asked
            await asyncio.sleep(EXIT_POLL_S)
        return self._popen.returncode

    async def wait_ready(self) -> None:
        """Wait until the probe says yes; on failure stop the process and raise StackError."""
        if self.spec.ready is None:
            return
        probe = self.spec.ready
        deadline = tenacity.stop_after_delay(self.spec.ready_within_s)
        retrying = tenacity.AsyncRetrying(
            stop=deadline,
            wait=tenacity.wait_fixed(READY_POLL_S),
            retry=tenacity.retry_if_result(lambda ready: not ready),
        )

        async def ready_or_gone() -> bool:
            return self.exited() or await probe()

        try:
            await retrying(ready_or_gone)
        except tenacity.RetryError:
            await self.stop()
            raise self.failure(f"was not ready within {self.spec.ready_within_s:g} s") from None
        except BaseException:
            await self.stop()
            raise
        if self.exited():
            raise self.failure(describe_exit(self._popen.returncode))

    async def stop(self) -> None:
        """Ask the process to end, and kill it and its descendants after the grace."""
        if self.exited():
            return
        family = descendants(self.identity)
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(self.spec.stop_signal)
        try:
            await asyncio.wait_for(self.wait_exit(), self.spec.stop_grace_s)
        except TimeoutError:
            self._signal_group(signal.SIGKILL)
            await asyncio.wait_for(self.wait_exit(), KILL_WAIT_S)
        finally:
            kill_remaining(family)

    def send_signal(self, sig: signal.Signals) -> int:
        """Send one signal to the process alone; return its pid."""
        if not self.exited():
            self._popen.send_signal(sig)
        return self.identity.pid

    def _signal_group(self, sig: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, sig)

    def failure(self, what: str) -> StackError:
        """The sentence for a process that failed, with the last thing it said itself."""
        tail = read_log(self.spec.log_path, self._log_offset_bytes)
        if DISK_FULL_TEXT in tail:
            return disk_full(self.spec.log_path, f"running {self.spec.name}")
        lines = [line.strip() for line in tail.splitlines() if line.strip()]
        said = f'; it last said "{_telling_line(lines)}"' if lines else ""
        return StackError(
            f"{self.spec.name} {what}{said}: read its log {self.spec.log_path}, mend what it "
            "names, and start again."
        )


async def run_to_end(spec: ProcessSpec, within_s: float = RUN_WITHIN_S) -> None:
    """Run a process that ends by itself; raise StackError unless it exits with 0 in time."""
    child = ChildProcess(spec)
    try:
        status = await asyncio.wait_for(child.wait_exit(), within_s)
    except TimeoutError:
        raise child.failure(f"did not end within {within_s:g} s") from None
    finally:
        await child.stop()
    if status != 0:
        raise child.failure(describe_exit(status))


def describe_exit(status: int) -> str:
    """Say how a process ended: "exited with status 1", "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def read_log(path: Path, offset_bytes: int) -> str:
    """The end of what was written to a log after `offset_bytes`."""
    try:
        with path.open("rb") as log:
            log.seek(max(offset_bytes, path.stat().st_size - LOG_TAIL_BYTES))
            return log.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _telling_line(lines: list[str]) -> str:
    """The last line that names an error, since servers often close with a polite remark."""
    telling = [line for line in lines if any(word in line for word in ("FATAL", "PANIC", "rror"))]
    return (telling or lines)[-1]


def _spawn(spec: ProcessSpec, log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        spec.argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(spec.env),
        # A session of its own: Ctrl-C at the terminal reaches the supervisor alone, which then
        # stops its children in order.
        start_new_session=True,
        # Only root may change its root, so there the user is changed afterwards.
        user=spec.user_id if spec.root is None else None,
        group=spec.user_id if spec.root is None else None,
        extra_groups=None if spec.user_id is None or spec.root is not None else (),
        # A few system calls and no lock between fork and exec, so other threads are no danger.
        preexec_fn=_before_exec(spec),  # noqa: PLW1509
    )


def _before_exec(spec: ProcessSpec) -> Callable[[], None]:
    """What the child does before it becomes the program."""
    die_with_parent = _die_with_parent(spec.death_signal)
    if spec.root is None:

        def prepare() -> None:
            _run_in_batches()
            if die_with_parent is not None:
                die_with_parent()

        return prepare
    root, user_id = str(spec.root), spec.user_id

    def change_root() -> None:
        _run_in_batches()
        os.chroot(root)
        os.chdir("/")
        if user_id is not None:
            os.setgroups([])
            os.setgid(user_id)
            os.setuid(user_id)
        # Last, since the kernel forgets the death signal when the user changes.
        if die_with_parent is not None:
            die_with_parent()

    return change_root


def _run_in_batches() -> None:
    """Tell the scheduler of the system that this process, with all that it starts, is in no hurry.

    The processes of a stack wake each other at every message. Ordinary ones take a core from
    whoever computes the moment that they wake; these wait for their turn, which saves most of the
    switches and costs no share of the machine.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # forbidden here and there, and only a matter of speed
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _die_with_parent(sig: signal.Signals) -> Callable[[], None] | None:
    """What the child runs before exec, so that it dies when its supervisor does."""
    if _LIBC is None:
        return None
    libc = _LIBC
    parent_pid = os.getpid()

    def set_death_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
        # The parent may have died before the call, and then no signal ever comes.
        if os.getppid() != parent_pid:
            os._exit(1)

    return set_death_signal


def _require_main_thread(name: str) -> None:
    # The kernel sends the death signal when the *thread* that forked ends, so a child forked by
    # a short-lived thread would die in the middle of its work.
    if threading.current_thread() is not threading.main_thread():
        raise StackError(
            f"{name} was to be started from the thread {threading.current_thread().name}, and "
            "would die with it: start the stack from the main thread."
        )
