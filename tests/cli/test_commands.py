"""The command line without a stack: help, refusals, what `init` writes, the shape of answers."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from dsec.cli import anchors, answer, tables
from dsec.cli import status as status_command
from dsec.cli import tools as tools_command
from dsec.cli.compare import assess
from dsec.cli.failures import failure_lines, missing_lines
from dsec.cli.init import TEMPLATES
from dsec.cli.main import COMMANDS, main
from dsec.cli.metrics import COLLECTED, reward_share
from dsec.cli.replay import asked_differently, place, verdict_line
from dsec.cli.run import run_on, warn_of_undeclared
from dsec.cli.sessions import curriculum_shown
from dsec.cli.tables import as_yaml, print_fields, print_summaries, print_table
from dsec.client.client import Client, Group
from dsec.client.queries import Summary
from dsec.client.specs import read_session
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.status import ProcessStatus, StackStatus
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


@pytest.mark.parametrize("name", ["anchors", "services", "sessions", "specs", "tools"])
def test_a_terminal_of_80_columns_cuts_no_help_of_a_group(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert "..." not in result.output.partition("Commands:")[2]


def test_sessions_are_chosen_by_the_same_options_everywhere() -> None:
    for command in (("run",), ("sessions", "list"), ("export",), ("rescore",)):
        told = dsec(*command, "--help").output
        assert "--group, --group-id ID" in told
    for command in (("run", "x"), ("sessions", "list")):
        told = dsec(*command, "--label", "half").output
        assert "'half' is no label: write it as KEY=VALUE" in told


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


def test_who_only_looks_hears_within_seconds_that_the_bus_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    monkeypatch.setenv("DSEC_NATS_URL", url)
    monkeypatch.setenv("DSEC_DATABASE_URL", f"postgresql://127.0.0.1:{free_port()}/log")
    began = monotonic()
    result = dsec("services", "status")
    assert monotonic() - began < 10
    assert result.exit_code == 1
    assert f"no NATS server answers at {url} within 4 s" in result.stderr


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


def _summary(n: int = 1, **what: Any) -> Summary:
    told = {"status": "completed", "code": "max_steps", "steps": 500, "reward_total": 492.487}
    shown = {**told, "chain_hash": "ab" * 32, "attempts": 1, "seed": 7, **what}
    return Summary(session_id=keys_id(n), **shown)


def keys_id(n: int) -> UUID:
    return UUID(f"01a22ea2-1f0f-7617-af99-{n:012x}")


@pytest.mark.parametrize(("width", "lacks"), [(60, "chain"), (80, "chain"), (120, None)])
def test_a_narrow_terminal_costs_columns_and_no_id(
    width: int,
    lacks: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tables, "out", Console(width=width))
    print_summaries([_summary(1), _summary(2)])
    told = capsys.readouterr()
    for n in (1, 2):
        assert f"{keys_id(n)}  completed" in told.out
    assert "492.487" in told.out
    assert "…" not in told.out
    assert all(len(line) <= width for line in told.out.splitlines())
    assert (lacks is None) == ("without" not in told.err)
    assert lacks is None or lacks in told.err


def test_a_table_that_does_not_fit_is_whole_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "out", Console(width=30))
    print_summaries([_summary()])
    assert str(keys_id(1)) in capsys.readouterr().out


def test_a_table_without_rows_says_what_makes_some(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(tables.plain_table("tool"), empty="No tools yet.")
    assert capsys.readouterr().out == "No tools yet.\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("sesions", "list"), "Did you mean `dsec sessions`?"),
        (("events", "1"), "Did you mean `dsec sessions events`?"),
        (("qqqq",), "`dsec --help` lists them."),
    ],
)
def test_a_command_that_is_none_is_told_what_was_meant(
    arguments: tuple[str, ...], told: str
) -> None:
    result = dsec(*arguments)
    assert result.exit_code == 2
    assert told in result.output


def test_python_and_folders_are_no_session_files(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("class A: ...\n")
    python, folder = dsec("run", str(tmp_path / "agent.py")), dsec("run", str(tmp_path))
    assert "agent.py is Python: give the YAML file" in python.output
    assert f"is a folder: name a file in it, such as {tmp_path}/session.yaml" in folder.output


def test_who_interrupts_hears_that_the_sessions_run_on() -> None:
    group = Group("g1", (keys_id(1), keys_id(2)))
    assert "The 2 requested sessions run on" in run_on([group])
    assert "--group g1" in run_on([group])
    assert "Nothing may have been requested yet" in run_on([])


def test_an_interrupt_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    @answer.answers
    def waits() -> None:
        raise KeyboardInterrupt("They run on.")

    with pytest.raises(SystemExit) as ended:
        waits()
    assert ended.value.code == answer.CODE_INTERRUPTED
    assert capsys.readouterr().err == "Interrupted. They run on.\n"


def test_an_empty_session_id_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("DSEC_DATABASE_URL", "postgresql://127.0.0.1:1/nobody")
    ended = dsec("tools", "status", "--session-id", "")
    assert ended.exit_code == 1
    assert "'' is no session id" in ended.output


def test_an_interrupt_while_a_command_is_imported_is_told_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", stopped)
    ended = dsec("sessions", "list")
    assert ended.exit_code == answer.CODE_INTERRUPTED
    assert ended.output == "Interrupted.\n"


def test_an_interrupt_while_click_is_imported_is_told_the_same() -> None:
    program = (
        "import builtins\nplain = builtins.__import__\n"
        "def stopped(name, *rest):\n"
        "    if name == 'click':\n        raise KeyboardInterrupt\n"
        "    return plain(name, *rest)\n"
        "builtins.__import__ = stopped\nimport dsec.cli.main\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (answer.CODE_INTERRUPTED, "Interrupted.\n")


def test_rewards_that_are_missing_of_a_session_that_completed_are_told() -> None:
    assert missing_lines([_summary(), _summary(2, status="failed", rewards_missing=1)]) == []
    (line,) = missing_lines([_summary(rewards_missing=3), _summary(2)])
    assert line.startswith("3 of 500 rewards of 1 session are missing")
    assert f"dsec sessions events {keys_id(1)} --kind reward.missing" in line


def test_a_difference_names_its_place_and_what_was_asked_differently() -> None:
    assert place({"step": None, "field": "reset.state_hash"}) == "at the first reset"
    assert place({"step": None, "field": "code"}) == "at the start or end"
    assert place({"step": 3, "field": "action"}) == "at step 3"
    a = _summary(specs={"agent": "x", "env": "y"})
    b = _summary(2, seed=8, specs={"agent": "z", "env": "y"})
    assert asked_differently(a, b) == "seed (7, 8) and agent"
    assert asked_differently(a, a) == ""


def test_a_database_that_is_away_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSEC_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("DSEC_DATABASE_URL", "postgresql://a:secret@127.0.0.1:2/x")
    result = dsec("sessions", "list")
    assert result.exit_code == 1
    assert "127.0.0.1:2/x, which DSEC_DATABASE_URL names?" in result.output
    assert "secret" not in result.output


async def test_a_log_that_is_away_keeps_nobody_from_asking_for_sessions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nowhere = "postgresql://dsec:x@127.0.0.1:1/dsec"
    async with Client(nats_url="nats://127.0.0.1:1", database_url=nowhere) as client:
        await warn_of_undeclared(client, {"stock"})
    assert capsys.readouterr().err == ""


def test_an_error_in_a_table_says_that_it_was_cut() -> None:
    assert tools_command._last_line("tool_raised: a\nb") == "tool_raised: b"
    told = tools_command._last_line(f"tool_raised: {'x' * 500}")
    assert told.endswith("x…")
    assert len(told) == len("tool_raised: ") + tools_command.ERROR_CHARS_MAX


def test_where_the_state_directory_is_no_option_the_variable_is_named() -> None:
    told = dsec("sessions", "list", "--state-dir", "x")
    assert told.exit_code == 2
    assert "DSEC_STATE_DIR" in told.stderr
    assert "DSEC_STATE_DIR" not in dsec("sessions", "list", "--state-dirr", "x").stderr


def test_the_logs_of_processes_are_told_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (tables, status_command):
        monkeypatch.setattr(module, "out", Console(width=60))
    log = f"/{'a' * 80}/recorder.log"
    process = ProcessStatus(name="recorder", pid=7, since=0.0, alive=True, log_path=log)
    found = StackStatus("running", Path("/a"), None, None, (process,), None)
    status_command._print_processes(found)
    assert log in capsys.readouterr().out
