"""Each bound of a process that runs user code, tried by a process that goes beyond it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsec.platform.settings import Settings
from dsec.platform.user_limits import (
    WALL_PROCESSES,
    UserLimits,
    kill_group,
    started_by,
    watch_processes,
)

LIMITS = UserLimits(
    memory_bytes_max=256 << 20, open_files_max=64, file_bytes_max=1 << 20, processes_max=8
)
NOBODY = 65534
BOUND = """
import resource, sys
sys.path[:] = {path!r}
from dsec.platform.user_limits import UserLimits
UserLimits.from_argument({limits!r}).apply()
"""
GREEDY = {
    "files": (
        "kept = []\nwhile len(kept) < 64: kept.append(open('/dev/null'))",
        "Too many open files",
    ),
    "file": ("f = open({folder!r} + '/f', 'wb')\nwhile True: f.write(bytes(65536))", "too large"),
    "memory": ("kept = []\nwhile True: kept.append(bytearray(1 << 20))", "MemoryError"),
}


def bound(code: str, limits: UserLimits = LIMITS) -> list[str]:
    start = BOUND.format(path=sys.path, limits=limits.argument())
    return [sys.executable, "-c", start + code]


@pytest.mark.parametrize("name", GREEDY)
def test_a_bound_is_kept(name: str, tmp_path: Path) -> None:
    code, told = GREEDY[name]
    argv = bound(code.format(folder=str(tmp_path)))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert told in done.stderr
    if name == "file":
        assert (tmp_path / "f").stat().st_size == LIMITS.file_bytes_max


def test_nothing_can_raise_a_bound_again_and_there_is_no_core_dump() -> None:
    code = """
print(resource.getrlimit(resource.RLIMIT_CORE))
for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_DATA):
    assert len(set(resource.getrlimit(which))) == 1, which
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run(bound(code), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["(0, 0)", "(64, 64)"]


def test_a_bound_above_the_machines_own_changes_nothing() -> None:
    limits = UserLimits(1 << 40, 1 << 40, 1 << 60, 1 << 20)
    code = "print(resource.getrlimit(resource.RLIMIT_NOFILE)[1])"
    argv = bound("", limits)
    argv[-1] = f"import resource; {code}\n{argv[-1]}\n{code}"
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    before, after = done.stdout.split()
    assert before == after


def test_threads_and_processes_share_the_cores_that_there_may_be() -> None:
    code = """
import os, subprocess, threading
told = "import os; print(len(os.sched_getaffinity(0)))"
exec(told)
thread = threading.Thread(target=exec, args=(told,))
thread.start(); thread.join()
print(subprocess.check_output([sys.executable, "-c", told], text=True), end="")
"""
    for cpus, seen in ((1, 1), (None, len(os.sched_getaffinity(0)))):
        done = subprocess.run(
            bound(code, replace(LIMITS, cpus_max=cpus)),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split() == [str(seen)] * 3
    assert Settings(user_cpus_max=3).user_limits(1 << 30).cpus_max == 3


def test_the_kernels_own_bound_of_processes_holds_for_everyone_but_root() -> None:
    """As root the kernel does not look at it: the watch alone keeps the bound."""
    as_nobody = "import os\nif os.getuid() == 0: os.setgroups([]); os.setuid(65534)\n"
    code = f"""
import os, resource
soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
assert 8 + {WALL_PROCESSES} < soft < 8 + {WALL_PROCESSES} + 20_000, soft
resource.setrlimit(resource.RLIMIT_NPROC, (20, 20))
started = 0
try:
    while started < 64:
        if os.fork() == 0:
            import time; time.sleep(5); os._exit(0)
        started += 1
except OSError as error:
    print(started, error.errno)
else:
    print(started, 0)
"""
    argv = bound("")
    argv[-1] = argv[-1].replace("UserLimits.from", as_nobody + "UserLimits.from") + code
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=True, start_new_session=True
    )
    started, error = map(int, done.stdout.split())
    assert error == 11, "EAGAIN"
    assert started < 64


BOMB = """
import os, time
print("begun", flush=True)
time.sleep(0.5)
while True:
    os.fork()
"""


@pytest.mark.parametrize("children", ["forked", "started"])
async def test_a_watch_ends_a_bomb_with_all_it_started(children: str) -> None:
    code = BOMB
    if children == "started":
        code = (
            "import subprocess\nprint('begun', flush=True)\n"
            "while True: subprocess.Popen(['sleep', '61.25'])"
        )
    bomb = await asyncio.create_subprocess_exec(
        *bound(code), stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert bomb.stdout is not None
    assert await bomb.stdout.readline() == b"begun\n"
    over = asyncio.Event()

    def on_over() -> None:
        kill_group(bomb.pid)
        over.set()

    watch = asyncio.create_task(watch_processes(bomb.pid, LIMITS.processes_max, on_over))
    async with asyncio.timeout(60):
        await over.wait()
        watch.cancel()
        assert await bomb.wait() == -9
        while _in_group(bomb.pid):  # noqa: ASYNC110 - the system has to be asked
            await asyncio.sleep(0.05)


def _in_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def test_processes_are_counted_with_what_they_start() -> None:
    nested = "sh -c 'sleep 30 & sleep 30 & wait' & sleep 30 & wait"
    shell = await asyncio.create_subprocess_exec("sh", "-c", nested, start_new_session=True)
    try:
        async with asyncio.timeout(60):
            while started_by(shell.pid, 100) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert started_by(shell.pid, 100) == 4
        assert started_by(shell.pid, 1) > 1
    finally:
        kill_group(shell.pid)
        await shell.wait()
    assert started_by(shell.pid, 100) == 0
