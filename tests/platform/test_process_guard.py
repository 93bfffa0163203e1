"""A session's code does not touch the signals of the process that it shares."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from dsec.platform import virtual
from dsec.session import chance
from dsec.session.chance import Chance


@pytest.fixture
def in_session() -> Iterator[None]:
    """User code of a session runs."""
    virtual.install()
    chance.activate(Chance(1))
    yield
    chance.deactivate()
    virtual.uninstall()


@pytest.mark.usefixtures("in_session")
@pytest.mark.parametrize(
    "attempt",
    [
        lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
        lambda: signal.setitimer(signal.ITIMER_REAL, 100),
        lambda: signal.alarm(100),
        lambda: signal.raise_signal(signal.SIGTERM),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        lambda: os.kill(os.getppid(), signal.SIGTERM),
        lambda: os.kill(0, signal.SIGTERM),
        lambda: os.killpg(0, signal.SIGTERM),
    ],
)
def test_signals_of_the_process_are_refused(attempt: Callable[[], object]) -> None:
    with pytest.raises(PermissionError, match="other sessions"):
        attempt()


@pytest.mark.usefixtures("in_session")
def test_processes_of_its_own_can_be_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(child.pid, 0)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_outside_of_sessions_signals_are_the_processs_own() -> None:
    virtual.install()
    try:
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)
    finally:
        virtual.uninstall()


async def test_the_workers_loop_is_not_found() -> None:
    virtual.install()
    try:
        loop = asyncio.get_running_loop()  # outside of a session it is
        assert asyncio.current_task() in asyncio.all_tasks()
        refused = []
        asks: tuple[Callable[[], object], ...] = (
            asyncio.get_running_loop,
            asyncio.get_event_loop,
            asyncio.get_event_loop_policy,
            asyncio.current_task,
            asyncio.all_tasks,
            asyncio.events.get_running_loop,
            asyncio.tasks.current_task,
        )
        chance.activate(Chance(1))
        for ask in asks:
            try:
                ask()
            except RuntimeError as error:
                refused.append("no running event loop" in str(error))
        chance.deactivate()
        assert refused == [True] * len(asks)
        assert asyncio.get_running_loop() is loop
    finally:
        chance.deactivate()
        virtual.uninstall()
