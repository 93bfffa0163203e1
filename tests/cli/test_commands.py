"""The command line without a stack: help, refusals, what `init` writes, the shape of answers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner, Result

from dsec.cli import anchors
from dsec.cli.compare import assess
from dsec.cli.failures import failure_lines
from dsec.cli.init import TEMPLATES
from dsec.cli.main import COMMANDS, main
from dsec.cli.metrics import COLLECTED, reward_share
from dsec.cli.replay import verdict_line
from dsec.cli.sessions import curriculum_shown
from dsec.cli.tables import as_yaml, print_fields
from dsec.client.queries import Summary
from dsec.client.specs import read_session
from dsec.platform.telemetry.metrics import NAMED
from dsec.session.memory_log import MemoryLog
from dsec_contracts import SessionRequested, keys
from dsec_contracts.session import RequestFact

HEAVY = ("torch", "sqlalchemy", "nats", "gymnasium", "asyncpg", "numpy")


@pytest.fixture(autouse=True)
def _no_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSEC_STATE_DIR", str(tmp_path / "state"))
    for name in ("DSEC_NATS_URL", "DSEC_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


def dsec(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize("module", ["dsec", "dsec.cli.main", "dsec.agent", "dsec.reward"])
def test_light_modules_stay_light(module: str) -> None:
    program = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_what_users_import_is_there() -> None:
    import dsec as package

    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        package.__getattr__("nonsense")
    anchor = package.Agent({})._create_state_anchor({"a": 1}, tags=["best"])
    assert anchor == package.StateAnchor({"a": 1}, ("best",))


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_and_json(name: str) -> None:
    result = dsec(name, "--help")
    assert result.exit_code == 0
    if name not in ("anchors", "services", "sessions", "specs", "tools"):
        assert "--json" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("sessions", "list"),
        ("sessions", "show", "0197abcd"),
        ("why", "0197abcd/step:1"),
        ("replay", "0197abcd"),
        ("verify", "0197abcd"),
        ("diff", "0197abcd", "0197abce"),
        ("metrics", "--metric", "rscr"),
        ("specs", "list"),
        ("export", "--format", "jsonl", "--out", "never-written.jsonl"),
        ("services", "list"),
        ("services", "status"),
        ("tools", "list"),
        ("anchors", "list"),
        ("anchors", "show", "0197abcd", "20"),
        ("anchors", "check"),
        ("tools", "status", "--session-id", "0197abcd"),
    ],
)
def test_without_a_stack_one_sentence_says_what_to_do(arguments: tuple[str, ...]) -> None:
    result = dsec(*arguments)
    assert result.exit_code == 1
    assert "no stack is running" in result.stderr
    assert "dsec up --detach" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_mistakes_in_files_are_told_before_a_stack_is_asked_for(tmp_path: Path) -> None:
    file = str(tmp_path / "no.yaml")
    for arguments in (("compare", file, file), ("run", file), ("specs", "register", "env", file)):
        result = dsec(*arguments)
        assert result.exit_code == 1
        assert f"{file} does not exist" in result.stderr


def test_init_writes_a_working_set_and_overwrites_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "one"
    result = dsec("init", str(folder), "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["ok"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(TEMPLATES)
    assert read_session(folder / "session.yaml").session.max_steps == 500
    again = dsec("init", str(folder))
    assert again.exit_code == 1
    assert "nothing was written" in again.stderr


def test_status_and_down_of_nothing() -> None:
    status = dsec("status", "--json")
    assert status.exit_code == 1
    told = json.loads(status.stdout)
    assert told["state"] == "stopped"
    assert told["log_storage"] is None
    assert told["scheduler_config"]["placement"] == "round_robin"
    down = dsec("down", "--json")
    assert down.exit_code == 0
    assert json.loads(down.stdout)["was_running"] is False


def test_status_shows_the_file_in_the_state_directory(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "scheduler.config.yaml").write_text("worker_deaths_max: 3\n")
    assert json.loads(dsec("status", "--json").stdout)["scheduler_config"]["worker_deaths_max"] == 3


def test_metrics_that_are_not_collected_say_so() -> None:
    for name, told in (("rvs_skew", "not collected yet"), ("rus", "sent over OTLP only")):
        result = dsec("metrics", "--metric", name)
        assert result.exit_code == 0
        assert told in result.stdout
    assert set(COLLECTED) < set(NAMED)


def test_reward_share_counts_what_cannot_be_computed_as_unequal() -> None:
    same, other = ({"reward_ok": ok, "error": None} for ok in (True, False))
    lost = {"reward_ok": None, "error": "the reward function is gone"}
    none = {"reward_ok": None, "error": None}
    assert reward_share([same, same]) == 1.0
    assert reward_share([same, other, lost, none]) == pytest.approx(1 / 3)
    assert reward_share([none]) is None


def summary(reward: float | None, status: str = "completed") -> Summary:
    """A session that is over."""
    return Summary(UUID(int=1), status, "max_steps", 5, reward, "", 1)


def test_reasons_are_told_once_with_the_next_step() -> None:
    assert failure_lines([summary(1.0)], {}) == []
    trace = 'Traceback\n  File "dsec_code_0123/agent.py", line 7, in step\nValueError: no [luck]\n'
    bad = [replace(summary(None, "failed"), session_id=UUID(int=n)) for n in range(3)]
    rejected = replace(summary(None, "rejected"), session_id=UUID(int=9), code="spec_not_found")
    lines = failure_lines([*bad, rejected], {s.session_id: trace for s in bad})
    assert lines == [
        f"{UUID(int=0)} failed, max_steps: agent.py, line 7: ValueError: no [luck] "
        "(and 2 more for the same reason)",
        f"{UUID(int=9)} rejected, spec_not_found",
        lines[-1],
    ]
    assert f"dsec sessions show {UUID(int=0)}" in lines[-1]
    assert "correct what the reason names" in failure_lines([rejected], {})[-1]


def test_a_verdict_says_what_was_compared_and_how_the_session_ended() -> None:
    verdict: dict[str, Any] = {
        "session_id": "s", "ok": True, "steps": 5, "complete": True, "error": None,
        "determinism": "D2",
        "ended": {"status": "completed", "code": "max_steps", "message": ""},
    }  # fmt: skip
    assert verdict_line(verdict) == "s  verified: 5 steps and their rewards are the same"
    failed = {"status": "failed", "code": "agent_raised", "message": "x\nValueError: no luck"}
    assert verdict_line({**verdict, "ended": failed}) == (
        "s  verified: 5 steps and their rewards are the same up to its recorded end, which is: "
        "failed, agent_raised: ValueError: no luck"
    )
    early = {"status": "failed", "code": "env_load_failed", "message": ""}
    assert "it took no step before its recorded end, which is: failed, env_load_failed" in (
        verdict_line({**verdict, "steps": 0, "ended": early})
    )
    running = verdict_line({**verdict, "ended": None, "complete": False})
    assert running.endswith("so far: it has not ended")
    recorded = verdict_line({**verdict, "determinism": "D0"})
    assert recorded == (
        "s  its record of 5 steps is whole and its rewards are the same; not executed again (D0)"
    )


def test_fields_are_told_without_python(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"code": None, "steps": 0, "intact": True, "labels": {"a": "b"}, "returns": [1.5]}
    print_fields(fields)
    assert capsys.readouterr().out.splitlines() == [
        "steps            0",
        "intact           yes",
        "labels           a b",
        "returns          [1.5]",
    ]
    assert as_yaml({"code": ["*.py"], "params": {"n": [1, 2]}}) == (
        "code:\n- '*.py'\nparams:\n  n:\n  - 1\n  - 2"
    )


def test_compare_averages_over_whole_pairs_and_names_the_others() -> None:
    a = [summary(1.0), summary(2.0), summary(3.0)]
    b = [summary(2.0), summary(4.0), summary(None, "failed")]
    told = assess(a, b)
    assert told["pairs"] == 2
    assert told["mean_difference"] == 1.5
    assert told["ok"] is False
    assert [f["status"] for f in told["failed"]] == ["failed"]
    assert assess([], [])["mean_difference"] is None


def test_tags_do_not_push_a_table_s_other_columns_out() -> None:
    assert anchors.shortened("every_steps") == "every_steps"
    assert len(anchors.shortened("long, " * 200)) == anchors.TAGS_SHOWN_CHARS


def test_show_has_the_level_that_was_given_last() -> None:
    log = MemoryLog(UUID("0192f0c1-2345-7abc-8def-0123456789ab"))
    told = {
        "session_id": log.session_id,
        **dict.fromkeys(("agent_spec", "env_spec", "reward_fn_hash"), "a" * 64),
        "seed": 1,
        "max_steps": 5,
        "creation_timestamp": "2026-01-01T00:00:00Z",
    }
    plain = RequestFact.model_validate(told)
    log.event(keys.REQUESTED, SessionRequested(fact=plain))
    assert curriculum_shown(log.rows) == {}
    log.rows.clear()
    asked = RequestFact.model_validate(told | {"curriculum_level": 0})
    log.event(keys.REQUESTED, SessionRequested(fact=asked))
    assert curriculum_shown(log.rows) == {"curriculum_level": 0, "curriculum_changes": 0}
    log.changed(1, 1, 0)
    log.changed(2, 2, 1)
    assert curriculum_shown(log.rows) == {"curriculum_level": 2, "curriculum_changes": 2}
