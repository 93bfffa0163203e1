"""`dsec up --detach` without a stack: what the process that it starts is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsec.cli.main import main
from dsec.cli.services import service_commands
from dsec.cli.stack import up

URLS = {
    "--nats-url": "nats://me:hunter2@127.0.0.1:4222",
    "--database-url": "postgresql://me:hunter2@127.0.0.1:5432/x",
}
STAND_IN = """#!{python}
import json, os, sys
found = dict(os.environ)
with open("/proc/self/cmdline") as file:
    json.dump([file.read(), found], open({told!r}, "w"))
os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b"ready\\n")
"""


def test_the_arguments_of_the_detached_process_hold_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, stand_in = tmp_path / "told.json", tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, told=str(told)))
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    arguments = [word for option in URLS.items() for word in option]
    state_dir = str(tmp_path / "state")
    result = CliRunner().invoke(
        main,
        ["up", "--detach", "--state-dir", state_dir, "--workers", "2", "--timescaledb", *arguments],
    )
    assert result.exit_code == 0, result.output
    command_line, environment = json.loads(told.read_text())
    assert "hunter2" not in command_line
    assert "--workers" in command_line
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = command_line.rstrip("\0").split("\0")
    with up.make_context("up", words[words.index("up") + 1 :]) as context:
        assert context.params["timescaledb"] is True
        assert context.params["nats_url"] == URLS["--nats-url"]
        assert context.params["database_url"] == URLS["--database-url"]
        assert context.params["object_store_url"] is None


def test_workers_stop_before_all_others_and_the_recorder_after_them() -> None:
    turns = {command.name: command.stop_turn for command in service_commands()}
    others = set(turns.values()) - {turns["env-runtime"], turns["recorder"]}
    assert turns["env-runtime"] < min(others)
    assert max(others) < turns["recorder"]


def test_workers_that_would_be_taken_for_dead_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_HEARTBEAT_PERIOD_S", "5")
    result = CliRunner().invoke(main, ["up", "--state-dir", str(tmp_path / "state")])
    assert result.exit_code != 0
    assert "DSEC_HEARTBEAT_PERIOD_S is 5 and heartbeat_limit_s is 4" in result.output
    assert "heartbeat_limit_s in scheduler.config.yaml to 20" in result.output


def test_a_variable_that_cannot_be_is_named_and_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_WORKERS", "hunter2")
    result = CliRunner().invoke(main, ["up", "--state-dir", str(tmp_path / "state")])
    assert result.exit_code == 1
    assert result.output.startswith("Error: DSEC_WORKERS: Input should be a valid integer")
    assert "hunter2" not in result.output
