"""The whole stack for end-to-end tests, started once by `dsec up`, as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.rows import dict_row

from dsec.client.client import Client
from dsec.platform.stack import stack_status

DSEC = (sys.executable, "-m", "dsec.cli")


@dataclass
class RunningStack:
    """What the tests reach the stack by."""

    state_dir: Path
    nats_url: str
    database_url: str
    object_store_url: str
    printed: str = ""
    """By `dsec up`."""

    def nats_url_of(self, user: str) -> str:
        """The URL of a user of the embedded NATS server; `dsec` may do everything."""
        passwords = json.loads((self.state_dir / "nats-passwords.json").read_text())
        return f"nats://{user}:{passwords[user]}@{self.nats_url.rpartition('@')[2]}"

    def sql(self, query: str, **parameters: Any) -> list[dict[str, Any]]:
        """Rows of a query."""
        with psycopg.connect(self.database_url, row_factory=dict_row) as connection:
            return connection.execute(query, parameters).fetchall()  # type: ignore[arg-type]

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes of this stack whose command line holds all of `words`."""
        supervisor = stack_status(self.state_dir).supervisor
        assert supervisor is not None
        found = []
        for process in psutil.Process(supervisor.pid).children(recursive=True):
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if all(word in line for word in words):
                found.append(process)
        return found

    def workers(self, *, isolated: bool = False) -> list[psutil.Process]:
        """Worker processes."""
        return [
            process
            for process in self.processes("--worker")
            if ("--isolated" in process.cmdline()) == isolated
        ]

    def client(self) -> Client:
        """A client of this stack."""
        return Client(
            nats_url=self.nats_url,
            database_url=self.database_url,
            object_store_url=self.object_store_url,
        )

    def dsec(self, *arguments: str, exit_code: int = 0, timeout_s: float = 180.0) -> Any:
        """What a command on this stack answers in JSON. Fails the test on another exit status."""
        done = subprocess.run(
            [*DSEC, *arguments, "--json"],
            env={**os.environ, "DSEC_STATE_DIR": str(self.state_dir)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == exit_code, done.stderr + done.stdout
        return json.loads(done.stdout)

    def until(self, holds: Callable[[], Any], timeout_s: float = 90.0, every_s: float = 0.1) -> Any:
        """Wait until `holds()` is true; fails the test otherwise."""
        deadline = time.monotonic() + timeout_s
        while not (result := holds()):
            assert time.monotonic() < deadline, f"not within {timeout_s} s"
            time.sleep(every_s)
        return result


@contextlib.contextmanager
def running_stack(state_dir: Path, *options: str, **environment: str) -> Iterator[RunningStack]:
    """A stack from `dsec up` to `dsec down`.

    Args:
        options: of `dsec up`.
        environment: that it is started in, beside ours.
    """
    where = ("--state-dir", str(state_dir))
    up = subprocess.run(
        [*DSEC, "up", "--detach", *where, *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert up.returncode == 0, up.stderr
    try:
        found = stack_status(state_dir).endpoints
        assert found is not None
        urls = found.nats_url, found.database_url, found.object_store_url
        yield RunningStack(state_dir, *urls, up.stdout + up.stderr)
    finally:
        subprocess.run([*DSEC, "down", *where], timeout=120, check=True)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The embedded stack, shared by the end-to-end tests."""
    state_dir = tmp_path_factory.mktemp("stack")
    environment = {
        "DSEC_WORKER_MEMORY_BYTES_MAX": str(1 << 30),
        "DSEC_USER_OPEN_FILES_MAX": "512",
        "DSEC_USER_FILE_BYTES_MAX": str(64 << 20),
        "DSEC_USER_PROCESSES_MAX": "32",
    }
    with running_stack(state_dir, **environment) as running:
        yield running
    told = (state_dir / "logs" / "nats-server.log").read_text()
    refused = [line for line in told.splitlines() if " Violation " in line]
    assert not refused, "whatever happened, nobody needed what its user may not do"


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[Client]:
    """A connected client."""
    async with stack.client() as connected:
        yield connected


@pytest.fixture
def session_files(tmp_path: Path) -> Callable[..., Path]:
    """Writes a session's files; returns the path of session.yaml."""

    def write(
        agent: str,
        *,
        env: str = "entry: gymnasium:CartPole-v1\n",
        reward: str = "env",
        max_steps: int = 50,
        agent_keys: str = "",
        session_keys: str = "",
        name: str = "case",
        files: dict[str, str] | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "agent.py").write_text(agent)
        (folder / "agent_spec.yaml").write_text(f"entry: agent.py:Agent\n{agent_keys}")
        (folder / "env_spec.yaml").write_text(env)
        for file, text in (files or {}).items():
            (folder / file).write_text(text)
        session = folder / "session.yaml"
        session.write_text(
            f"agent: agent_spec.yaml\nenv: env_spec.yaml\nreward: {reward}\n"
            f"seed: 3\nmax_steps: {max_steps}\n{session_keys}"
        )
        return session

    return write


GOOD_AGENT = '''
class Agent:
    """Leans with the pole, and remembers: a wrong restart would show."""

    def __init__(self, session_config):
        self.space = session_config["action_space"]
        self.total = 0.0

    def step(self, observation):
        lean = 1 if observation[2] + 0.01 * self.total > 0 else 0
        return {"action": self.space.sample() if int(self.total) % 3 == 0 else lean}

    def on_reward(self, reward, done, info):
        self.total += reward
'''


@pytest.fixture
def good_agent() -> str:
    """An agent that does its work."""
    return GOOD_AGENT
