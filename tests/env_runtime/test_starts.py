"""Whose code started a process, whichever way it did."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from dsec.env_runtime.running import RunningSlot, Starter
from dsec.env_runtime.starts import watch_starts

ONE, OTHER = UUID(int=1), UUID(int=2)


def spawned() -> None:
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()


def posix_spawned() -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    os.waitpid(pid, 0)


def posix_spawned_by_subprocess() -> None:
    subprocess.run(["true"], close_fds=False, check=True)


STARTS: tuple[Callable[[], object], ...] = (
    lambda: subprocess.run(["true"], check=True),
    lambda: os.system("true"),
    lambda: os.popen("true").read(),
    lambda: os.spawnlp(os.P_WAIT, "true", "true"),
    posix_spawned,
    posix_spawned_by_subprocess,
    spawned,
)


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[RunningSlot]:
    """A slot with two sessions, in which it is noted who starts processes."""
    made = RunningSlot(tmp_path / "slot", 4, create=True)
    made.assign(0, ONE, 30.0)
    made.assign(3, OTHER, 30.0)
    undo = watch_starts(made)
    yield made
    undo()
    made.close(remove=True)


@pytest.mark.parametrize("start", STARTS)
def test_whoever_starts_a_process_is_noted(slot: RunningSlot, start: Callable[[], object]) -> None:
    assert slot.starter() is None
    slot.enter(3, 7, 0)
    start()
    slot.enter(0, 8, 0)
    slot.clear()
    assert slot.starter() == Starter(OTHER, 7)


def test_what_the_worker_itself_starts_is_nobodys(slot: RunningSlot) -> None:
    slot.clear()
    os.system("true")
    assert slot.starter() is None


def test_the_last_one_counts_and_stays_itself_when_its_place_is_anothers(slot: RunningSlot) -> None:
    for index in (0, 3):
        slot.enter(index, 5, 0)
        os.system("true")
    slot.assign(3, ONE, 30.0)
    assert slot.starter() == Starter(OTHER, 5)
