"""One child process: ready in time or stopped, stopped for good, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from dsec.platform.stack.errors import StackError
from dsec.platform.stack.identity import (
    ProcessIdentity,
    descendants,
    end_process,
    own_identity,
    wait_gone,
)
from dsec.platform.stack.process import ChildProcess, ProcessSpec, run_to_end

GONE_WITHIN_S = 60.0

Eventually = Callable[[Callable[[], object]], Awaitable[None]]


def python(tmp_path: Path, code: str, **how: object) -> ProcessSpec:
    return ProcessSpec(
        name="child",
        argv=(sys.executable, "-c", code),
        log_path=tmp_path / "logs" / "child.log",
        **how,  # type: ignore[arg-type]
    )


def is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_what_a_child_says_is_in_its_private_log(tmp_path: Path) -> None:
    child = ChildProcess(python(tmp_path, "print('hello')"))
    assert await child.wait_exit() == 0
    assert child.spec.log_path.read_text() == "hello\n"
    assert child.spec.log_path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a scheduling class of Linux")
async def test_a_child_and_what_it_starts_take_no_core_from_whoever_computes(
    tmp_path: Path,
) -> None:
    code = "import os; os.fork() and os.wait(); print(os.sched_getscheduler(0), flush=True)"
    child = ChildProcess(python(tmp_path, code))
    assert await child.wait_exit() == 0
    lines = child.spec.log_path.read_text().splitlines()
    assert lines == [str(os.SCHED_BATCH)] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(
    tmp_path: Path, eventually: Eventually
) -> None:
    code = (
        "import signal,time;signal.signal(15,signal.SIG_IGN);print('on',flush=True);time.sleep(99)"
    )
    child = ChildProcess(python(tmp_path, code, stop_grace_s=0.2))
    await eventually(lambda: "on" in child.spec.log_path.read_text())
    await child.stop()
    assert child.returncode == -signal.SIGKILL
    await child.stop()


async def test_a_child_that_is_never_ready_is_stopped_and_named(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    spec = python(tmp_path, "import time;time.sleep(99)", ready=never, ready_within_s=0.2)
    child = ChildProcess(spec)
    with pytest.raises(StackError, match=r"^child was not ready within 0.2 s: read its log .*log"):
        await child.wait_ready()
    assert not child.identity.is_alive()


async def test_a_child_that_dies_at_start_tells_its_last_error(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    child = ChildProcess(python(tmp_path, "raise SystemExit('bind error: no')", ready=never))
    with pytest.raises(StackError, match=r'child exited with status 1; it last said "bind error'):
        await child.wait_ready()


async def test_a_full_disk_is_recognised_in_what_a_child_says(tmp_path: Path) -> None:
    spec = python(tmp_path, "raise SystemExit('write: No space left on device')")
    with pytest.raises(
        StackError, match=r"The disk that holds .* is full, so running child failed"
    ):
        await run_to_end(spec)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    spec = ProcessSpec(name="server", argv=("/nowhere/server",), log_path=tmp_path / "log")
    with pytest.raises(StackError, match="server cannot be started from /nowhere/server"):
        ChildProcess(spec)


def test_a_child_may_only_be_forked_by_the_main_thread(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def fork() -> None:
        try:
            ChildProcess(python(tmp_path, ""))
        except StackError as error:
            raised.append(error)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert "from the main thread" in str(raised[0])


@pytest.mark.skipif(sys.platform != "linux", reason="needs waitid without reaping")
async def test_the_group_of_a_child_that_died_is_killed(
    tmp_path: Path, eventually: Eventually
) -> None:
    code = (
        "import subprocess,os;"
        "p=subprocess.Popen(['sleep','99']);print('pid',p.pid,'.',flush=True);os._exit(3)"
    )
    child = ChildProcess(python(tmp_path, code))
    assert await child.wait_exit() == 3
    pid = int(child.spec.log_path.read_text().split()[1])
    await eventually(lambda: not psutil.pid_exists(pid) or is_zombie(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a death signal")
async def test_a_child_dies_with_its_killed_parent(tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from dsec.platform.stack.process import ChildProcess, ProcessSpec
child = ChildProcess(ProcessSpec("child", ("sleep", "99"), Path({str(tmp_path / "log")!r})))
print(child.identity.pid, child.identity.create_time, flush=True)
os.kill(os.getpid(), 9)
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await parent.communicate()
    pid, create_time = said.split()
    assert await wait_gone(ProcessIdentity(int(pid), float(create_time)), GONE_WITHIN_S)


async def test_a_process_with_a_reused_pid_is_never_signalled() -> None:
    stranger = ProcessIdentity(os.getpid(), own_identity().create_time - 3600)
    assert not stranger.is_alive()
    assert not await end_process(stranger, signal.SIGKILL, 0.1)


async def test_a_process_that_is_not_our_child_is_ended_with_its_family(
    eventually: Eventually,
) -> None:
    code = "import subprocess;subprocess.run(['setsid','sleep','99'])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    identity = ProcessIdentity.of(process.pid)
    await eventually(lambda: descendants(identity))
    family = [ProcessIdentity.of(one.pid) for one in descendants(identity)]
    assert await end_process(identity, signal.SIGTERM, GONE_WITHIN_S)
    assert await wait_gone(family[0], GONE_WITHIN_S)
    await process.wait()
