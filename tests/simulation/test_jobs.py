"""Seeds in processes of their own: a run that is interrupted, or loses one, ends with them all."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.simulation.jobs import portions

ROOT = Path(__file__).parents[2]
STARTS_S_MAX = 60.0
ENDS_S_MAX = 15.0


class Run(psutil.Popen):
    """A run that would take very long, with both of its processes once they are at work."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.simulation", "--seeds", "100000", "--jobs", "2"]
        super().__init__(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.begun: list[psutil.Process] = []


@pytest.fixture
def run() -> Iterator[Run]:
    """It is killed with both of them."""
    running = Run()
    yield running
    for process in (running, *running.begun):
        if process.is_running():
            process.kill()
    running.wait()


def workers(run: psutil.Popen) -> list[psutil.Process]:
    """Its processes that run seeds."""
    return [one for one in run.children() if "spawn_main" in " ".join(one.cmdline())]


def at_work(run: Run) -> list[psutil.Process]:
    """Its two processes, once they run seeds."""
    until = time.monotonic() + STARTS_S_MAX
    while time.monotonic() < until:
        found = workers(run)
        if len(found) == 2 and all(sum(one.cpu_times()[:2]) > 3 for one in found):
            run.begun.extend(found)
            return found
        time.sleep(0.1)
    raise AssertionError("it does not start")


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_ends_with_its_processes(run: Run, how: signal.Signals) -> None:
    processes = at_work(run)
    run.send_signal(how)
    assert run.wait(ENDS_S_MAX) != 0
    _, alive = psutil.wait_procs(processes, ENDS_S_MAX)
    assert not alive


def test_a_process_that_dies_fails_the_run_and_names_its_seeds(run: Run) -> None:
    one, other = at_work(run)
    one.kill()
    assert run.wait(ENDS_S_MAX) == 1
    assert "a process died while seeds 0 to 19 were run" in run.stderr.read()
    _, alive = psutil.wait_procs([other], ENDS_S_MAX)
    assert not alive


@pytest.mark.parametrize(("count", "jobs", "sizes"), [(8, 2, [4, 4]), (3, 4, [1, 1, 1])])
def test_every_job_gets_a_portion(count: int, jobs: int, sizes: list[int]) -> None:
    found = portions(5, count, jobs)
    assert [len(seeds) for seeds in found] == sizes
    assert [seed for seeds in found for seed in seeds] == list(range(5, 5 + count))


def test_portions_are_small_enough_for_a_run_that_has_to_end_in_time() -> None:
    assert {len(seeds) for seeds in portions(0, 2000, 2)} == {20}
