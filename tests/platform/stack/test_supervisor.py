"""Restarts: after a growing pause, and not for ever where nothing works without the process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dsec.platform.stack import supervisor
from dsec.platform.stack.errors import StackError
from dsec.platform.stack.process import ProcessSpec
from dsec.platform.stack.supervisor import (
    RESTART_PAUSE_MAX_S,
    SupervisedProcess,
    restart_pause_s,
)

WITHIN_S = 60.0

Eventually = Callable[[Callable[[], object]], Awaitable[None]]


def supervised(
    tmp_path: Path, code: str, said: list[str], restarts_max: int | None = None
) -> SupervisedProcess:
    spec = ProcessSpec("child", (sys.executable, "-c", code), tmp_path / "child.log")
    return SupervisedProcess(
        spec, restarts_max=restarts_max, on_change=lambda: None, on_progress=said.append
    )


def test_the_pause_doubles_up_to_its_bound() -> None:
    pauses = [restart_pause_s(failures) for failures in (1, 2, 3, 4, 1000)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, RESTART_PAUSE_MAX_S]


async def test_a_process_that_is_killed_comes_back_and_a_stopped_one_does_not(
    tmp_path: Path, eventually: Eventually
) -> None:
    said: list[str] = []
    process = supervised(tmp_path, "import time;time.sleep(99)", said)
    await process.start()
    assert process.child is not None
    first = process.child.send_signal(signal.SIGKILL)
    await eventually(lambda: "child was started again." in said)
    second = process.child.identity
    assert second.pid != first
    assert said == [
        f"child was killed by SIGKILL; its log is {tmp_path / 'child.log'}. "
        "Starting it again in 0.1 s.",
        "child was started again.",
    ]
    await process.stop()
    assert not second.is_alive()
    assert process.restarts == 1


async def test_a_server_that_keeps_dying_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_PAUSE_FIRST_S", 0.01)
    said: list[str] = []
    process = supervised(tmp_path, "raise SystemExit(4)", said, restarts_max=2)
    await process.start()
    with pytest.raises(StackError, match=r"child was started again 2 times .* status 4"):
        await asyncio.wait_for(process.watching, WITHIN_S)
    assert [text for text in said if "in 0.01 s" in text or "in 0.02 s" in text] == said[::2]
    assert len(said) == 4
    await process.stop()
