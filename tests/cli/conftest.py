"""One running stack for the command's tests, started by `dsec up` as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dsec.cli.main import main

START_WITHIN_S = 100
VARIABLES = ("DSEC_STATE_DIR", "DSEC_NATS_URL", "DSEC_DATABASE_URL")


@dataclass(frozen=True)
class RunningStack:
    """A stack that is up, and a folder with the files that `dsec init` writes."""

    state_dir: Path
    project: Path
    environment: dict[str, str]

    def dsec(self, *arguments: str, exit_code: int = 0) -> Result:
        """Run the command in this process: a new one would import everything each time."""
        environment = {name: self.environment.get(name) for name in VARIABLES}
        result = CliRunner().invoke(main, list(arguments), env=environment)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == exit_code, result.output
        return result

    def json(self, *arguments: str, exit_code: int = 0) -> Any:
        """What a command answers in JSON."""
        return json.loads(self.dsec(*arguments, "--json", exit_code=exit_code).stdout)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The embedded stack, shared by all tests of the command."""
    state_dir = tmp_path_factory.mktemp("cli-stack")
    environment = {**os.environ, "DSEC_STATE_DIR": str(state_dir)}
    for name in ("DSEC_NATS_URL", "DSEC_DATABASE_URL"):
        environment.pop(name, None)
    running = RunningStack(state_dir, tmp_path_factory.mktemp("project") / "p", environment)
    up = subprocess.run(
        [sys.executable, "-m", "dsec.cli", "up", "--detach", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_WITHIN_S,
        check=False,
    )
    assert up.returncode == 0, up.stderr
    try:
        assert json.loads(up.stdout)["ok"]
        running.dsec("init", str(running.project))
        yield running
    finally:
        running.dsec("down")
