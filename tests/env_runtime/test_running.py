"""The shared memory that outlives a worker."""

import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID

from dsec.env_runtime.running import EXIT_OUT_OF_MEMORY, RunningSlot

SESSION = UUID("0192f0c1-2345-7abc-8def-0123456789ab")


def test_a_dead_process_leaves_who_ran(tmp_path: Path) -> None:
    slot = RunningSlot(tmp_path / "slot", 4, create=True)
    program = (
        "import os, sys; from pathlib import Path; from uuid import UUID\n"
        "from dsec.env_runtime.running import RunningSlot\n"
        "slot = RunningSlot(Path(sys.argv[1]), 4, create=False)\n"
        f"slot.assign(2, UUID('{SESSION}'), 1.5)\n"
        "slot.enter(2, 17, 99)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(slot.path)], check=False)
    assert done.returncode == -9
    running = slot.read()
    assert running is not None
    assert (running.session_id, running.step) == (SESSION, 17)
    assert (running.since_ns, running.step_deadline_s) == (99, 1.5)


def test_nobody_runs_before_and_after(tmp_path: Path) -> None:
    slot = RunningSlot(tmp_path / "slot", 4, create=True)
    assert slot.read() is None
    slot.assign(0, SESSION, 1.0)
    slot.enter(0, 1, 1)
    slot.clear()
    assert slot.read() is None


def test_memory_error_ends_the_process_at_once_and_says_so(tmp_path: Path) -> None:
    slot = RunningSlot(tmp_path / "slot", 4, create=True)
    child = os.fork()
    if child == 0:
        slot.assign(0, SESSION, 1.0)
        slot.enter(0, 3, 1)
        slot.end_out_of_memory()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_OUT_OF_MEMORY
    assert slot.is_out_of_memory
    running = slot.read()
    assert running is not None
    assert running.session_id == SESSION


def test_a_reader_never_sees_half_of_what_was_written(tmp_path: Path) -> None:
    """A step that seems to have begun at time 0 would be killed for its deadline."""
    slot = RunningSlot(tmp_path / "slot", 4, create=True)
    slot.assign(0, SESSION, 1.0)
    child = os.fork()
    if child == 0:
        for n in range(400_000):
            slot.enter(0, n, 1_000_000 + n)
            slot.clear()
        os._exit(0)
    seen = []
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        running = slot.read()
        if running is not None:
            seen.append(running)
    assert seen
    assert all(running.since_ns >= 1_000_000 for running in seen)
