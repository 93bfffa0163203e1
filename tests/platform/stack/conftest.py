"""A supervisor in a process of its own, and a small disk that can be filled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tenacity

from dsec.platform.stack import Endpoints

PROGRAM = Path(__file__).with_name("supervisor_program.py")
EXIT_WITHIN_S = 60.0
EVENTUALLY_WITHIN_S = 60.0
POLL_S = 0.01

Eventually = Callable[[Callable[[], object]], Awaitable[None]]


@dataclass(frozen=True)
class Supervisor:
    """A running supervisor: its process, its endpoints, and what it said until it was ready."""

    process: subprocess.Popen[str]
    endpoints: Endpoints
    progress: tuple[str, ...]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(EXIT_WITHIN_S)


@pytest.fixture
def start_supervisor(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    """Start a supervisor on a state directory and wait until it is up."""
    started: list[subprocess.Popen[str]] = []

    def start(state_dir: Path, *service_argv: str) -> Supervisor:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(state_dir), *service_argv],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        progress: list[str] = []
        for text in process.stdout:
            line = json.loads(text)
            if "ready" in line:
                return Supervisor(process, Endpoints(**line["ready"]), tuple(progress))
            progress.append(line.get("progress") or line["error"])
        raise AssertionError(f"the supervisor ended before it was ready: {progress}")

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(EXIT_WITHIN_S)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def eventually() -> Eventually:
    """Wait, within a bound, until a condition holds."""

    async def wait_until(condition: Callable[[], object]) -> None:
        async def holds() -> bool:
            return bool(condition())

        await tenacity.AsyncRetrying(
            stop=tenacity.stop_after_delay(EVENTUALLY_WITHIN_S),
            wait=tenacity.wait_fixed(POLL_S),
            retry=tenacity.retry_if_result(lambda held: not held),
        )(holds)

    return wait_until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount an empty disk of so many megabytes; skip where this user may not."""
    mounted: list[Path] = []

    def mount(size_mb: int, *options: str) -> Path:
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        how = ",".join((f"size={size_mb}m", *options))
        command = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(path)]
        if os.geteuid() != 0 or not _succeeds(command):
            pytest.skip("mounting a small disk needs root")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
