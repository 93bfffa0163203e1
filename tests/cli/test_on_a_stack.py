"""Every command on a running stack: documented keys, exit codes, and what they find."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from uuid import UUID

import numpy as np
import psycopg
import pytest
import yaml

import dsec

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]

SUMMARY_KEYS = {"session_id", "status", "code", "steps", "reward_total", "chain_hash", "attempts"}
README = (Path(__file__).parents[2] / "README.md").read_text()
STEPS = 40


class RunningStack(Protocol):
    """See conftest.py."""

    state_dir: Path
    project: Path

    def dsec(self, *arguments: str, exit_code: int = 0) -> Any: ...
    def json(self, *arguments: str, exit_code: int = 0) -> Any: ...


def session_file(stack: RunningStack, name: str, agent: str | None = None) -> Path:
    """A short session in the project's folder, with an agent of its own if one is given."""
    path = stack.project / f"{name}.yaml"
    agent_spec = "agent_spec.yaml"
    if agent is not None:
        (stack.project / f"{name}_agent.py").write_text(agent)
        agent_spec = f"{name}_agent.yaml"
        (stack.project / agent_spec).write_text(
            f"entry: {name}_agent.py:A\ncode: ['{name}_agent.py']\n"
        )
    path.write_text(
        f"agent: {agent_spec}\nenv: env_spec.yaml\nreward: reward.py:balance\n"
        f"seed: 7\nmax_steps: {STEPS}\n"
    )
    return path


def documented() -> dict[str, list[str]]:
    """The keys that the README promises of each command's `--json`, up to what is nested."""
    section = README.partition("\n## Answers for programs\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `dsec ([a-z -]+)` \| (.*) \|$", section, re.MULTILINE)
    told = {
        name: re.findall(r"`([a-z0-9_]+)`", re.split(r";|: null or ", text)[0])
        for name, text in rows
    }
    told["validate-determinism"] = told["demo"]
    told["sessions show"] += told["sessions list"]
    return told


@pytest.fixture(scope="module")
def equal(stack: RunningStack) -> list[str]:
    """The ids of two equal sessions that completed."""
    file = session_file(stack, "short")
    told = stack.json("run", str(file), "--count", "2", "--seeds", "same", "--follow")
    assert told["ok"]
    return [str(i) for i in told["session_ids"]]


def test_answers_have_the_keys_that_are_documented(stack: RunningStack, equal: list[str]) -> None:
    file = session_file(stack, "keys")
    calls = {
        "run": [str(file), "--follow"],
        "sessions list": [],
        "sessions show": equal[:1],
        "sessions events": equal[:1],
        "why": equal[:1],
        "replay": equal[:1],
        "verify": equal[:1],
        "diff": equal,
        "metrics": ["--metric", "ssal_p95"],
        "status": [],
    }
    elsewhere = {"demo", "validate-determinism", "compare"}  # in tests of their own, below
    told = documented()
    assert told.keys() == calls.keys() | elsewhere
    for name, arguments in calls.items():
        found = stack.json(*name.split(), *arguments)
        for one in found if isinstance(found, list) else [found]:
            assert set(told[name]) <= set(one), name
            assert len(told[name]) > 2


def test_sessions(stack: RunningStack, equal: list[str]) -> None:
    listed = stack.json("sessions", "list")
    assert set(listed[0]) >= SUMMARY_KEYS
    mine = [s for s in listed if s["session_id"] in equal]
    assert {s["status"] for s in mine} == {"completed"}
    assert len({s["chain_hash"] for s in mine}) == 1
    shown = stack.json("sessions", "show", equal[0])
    assert shown["steps"] == STEPS
    assert shown["placements"][0]["attempt"] == 1
    events = stack.json("sessions", "events", equal[0], "--facts")
    assert [e["key"] for e in events[:2]] == ["requested", "placed:1"]
    assert events[-1]["key"] == "ended"
    assert len([e for e in events if e["kind"] == "session.stepped"]) == STEPS
    assert equal[0] in stack.dsec("sessions", "list").stdout
    assert "max_steps" in stack.dsec("sessions", "show", equal[0]).stdout
    assert "reward:3.1" in stack.dsec("sessions", "events", equal[0]).stdout


def test_sessions_are_listed_by_label_and_group(stack: RunningStack) -> None:
    file = session_file(stack, "labelled")
    labels = ("--label", "run=a", "--label", 'it\'s="1"')
    told = stack.json("run", str(file), *labels, "--group", "labelled", "--follow")

    def listed(*chosen: str) -> list[str]:
        return [s["session_id"] for s in stack.json("sessions", "list", *chosen)]

    assert listed(*labels) == listed("--group", "labelled") == told["session_ids"]
    assert listed("--label", "run=a", "--label", "run2=a") == []
    empty = stack.dsec("sessions", "list", "--label", "run=b").stdout
    assert empty.startswith("No such sessions")


def test_ids_may_be_cut_short_as_long_as_they_are_unique(
    stack: RunningStack, equal: list[str]
) -> None:
    assert stack.json("replay", equal[1][:-2])["session_id"] == equal[1]
    assert stack.json("replay", equal[1][-8:])["session_id"] == equal[1], "or its end"
    said = stack.dsec("replay", equal[0][:8], exit_code=1).stderr
    assert "is ambiguous" in said
    assert "give more of it" in said
    assert equal[0] in said or "…" in said
    assert "has no session" in stack.dsec("replay", "00000000", exit_code=1).stderr
    assert "is no session id" in stack.dsec("replay", "my session", exit_code=1).stderr


def test_why_walks_to_the_request(stack: RunningStack, equal: list[str]) -> None:
    told = stack.json("why", f"{equal[0]}/reward:1.1")
    keys = [cause["event"].partition("/")[2] for cause in told["causes"]]
    assert keys == ["step:1", "reward:0.1", "step:0", "started", "placed:1", "requested"]
    kinds = {cause["kind"] for cause in told["causes"]}
    assert {"session.requested", "session.placed", "session.stepped", "reward.scored"} <= kinds
    assert "more …" in stack.dsec("why", equal[0]).stdout
    assert "has no event" in stack.dsec("why", f"{equal[0]}/step:999", exit_code=1).stderr


def test_replay_verify_and_diff(stack: RunningStack, equal: list[str]) -> None:
    state = stack.json("replay", equal[0])
    assert {"session_id", "status", "steps", "reward_total", "chain_hash"} <= set(state)
    assert state["intact"]
    text = stack.dsec("replay", equal[0], "--at", "9").stdout
    assert "running" in text
    assert "None" not in text
    at = stack.json("replay", equal[0], "--at", "9")
    assert (at["status"], at["steps"]) == ("running", 10)
    assert "its last one is" in stack.dsec("replay", equal[0], "--at", "900", exit_code=1).stderr
    verdict = stack.json("verify", equal[0])
    assert {"session_id", "ok", "steps", "reward_ok", "first_divergence"} <= set(verdict)
    assert (verdict["ok"], verdict["steps"], verdict["reward_ok"]) == (True, STEPS, True)
    same = stack.json("diff", *equal)
    assert same == {"equal": True, "rows_read": same["rows_read"], "first_difference": None}
    assert same["rows_read"] < STEPS


def test_compare_and_diff_of_what_differs(stack: RunningStack) -> None:
    agent = (
        "class A:\n    def __init__(self, c): ...\n    def step(self, o): return {'action': %s}\n"
    )
    lean = session_file(stack, "lean", agent % "int(o[2] > 0)")
    left = session_file(stack, "left", agent % "0")
    told = stack.json("compare", str(left), str(lean), "--count", "4")
    assert set(documented()["compare"]) <= set(told)
    assert told["pairs"] == 4
    low, high = told["ci95"]
    assert low < told["mean_difference"] < high
    assert told["mean_difference"] > 0, "leaning with the pole is better"
    first = told["first_divergences"][0]
    assert (first["field"], first["step"] is not None) == ("action", True)
    parted = stack.json("diff", first["a"], first["b"], exit_code=1)
    assert parted["equal"] is False
    assert set(parted["first_difference"]) == {"step", "field", "a", "b"}
    assert parted["first_difference"]["step"] == first["step"]


def test_a_failing_agent_is_a_no_with_its_reason(stack: RunningStack) -> None:
    text = (
        "class A:\n    n = 0\n    def __init__(self, c): ...\n    def step(self, o):\n"
        "        self.n += 1\n        if self.n > 5: raise ValueError('out of luck')\n"
        "        return {'action': 0}\n"
    )
    told = stack.json("run", str(session_file(stack, "bad", text)), "--follow", exit_code=1)
    assert told["ok"] is False
    assert (told["sessions"][0]["status"], told["sessions"][0]["code"]) == (
        "failed",
        "agent_raised",
    )
    assert "out of luck" in told["sessions"][0]["message"]
    shown = stack.dsec("sessions", "show", told["session_ids"][0]).stdout
    assert "ValueError: out of luck" in shown
    assert "{" not in shown, "no Python"
    assert stack.json("verify", told["session_ids"][0])["ok"], "it fails again in the same way"
    said = stack.dsec("verify", told["session_ids"][0]).stdout
    assert "5 steps and their rewards are the same up to its recorded end" in said
    assert "failed, agent_raised: bad_agent.py, line 6: ValueError: out of luck" in said
    followed = stack.dsec("run", str(stack.project / "bad.yaml"), "--follow", exit_code=1).stderr
    assert "failed, agent_raised: bad_agent.py, line 6: ValueError: out of luck" in followed
    assert "Next: `dsec sessions show" in followed


def test_specs_metrics_and_status(stack: RunningStack, equal: list[str]) -> None:
    spec_hash = stack.json("sessions", "show", equal[0])["specs"]["agent"]
    assert spec_hash in {spec["spec_hash"] for spec in stack.json("specs", "list")}
    shown = stack.json("specs", "show", spec_hash[:10])
    assert shown["document"]["entry"] == "agent.py:Climber"
    lines = stack.dsec("specs", "show", spec_hash[:10]).stdout.splitlines()
    document = yaml.safe_load("\n".join(lines))
    assert document == shown["document"]
    assert "code:" in lines, "in block style, as a file would say it"
    assert "- agent.py" in lines
    again = stack.json("specs", "register", "agent", str(stack.project / "agent_spec.yaml"))
    assert again["spec_hash"] == spec_hash
    assert stack.json("metrics", "--metric", "rscr", "--sessions", "3")["value"] == 1.0
    assert 0 < stack.json("metrics", "--metric", "ssal_p95")["value"] < 60
    status = stack.json("status")
    assert status["state"] == "running"
    assert {p["name"] for p in status["processes"]} >= {"recorder", "scheduler", "reward"}
    assert set(status["put_aside"]) == {"dead_letters", "parked", "conflicts"}
    masked = stack.dsec("status").stdout
    variables = stack.json("env")
    for name in ("DSEC_NATS_URL", "DSEC_DATABASE_URL"):
        password = urlsplit(variables[name]).password
        assert password
        assert password not in masked
        assert password not in json.dumps(status)
        assert f"export {name}={variables[name]}" in stack.dsec("env").stdout.splitlines()
    assert urlsplit(variables["DSEC_NATS_URL"]).username == "dsec-client"


def test_an_output_that_came_again_with_another_fact_is_told(
    stack: RunningStack, equal: list[str]
) -> None:
    assert stack.json("sessions", "show", equal[0])["conflicts"] == []
    with psycopg.connect(stack.json("env", "--owner")["DSEC_DATABASE_URL"]) as connection:
        connection.execute(
            "insert into event_aside select l.*, 'conflict', l.epoch, l.sequence - 1, 0 "
            "from event_log l where session_id = %s and key = 'step:3'",
            (equal[0],),
        )
    try:
        [told] = stack.json("sessions", "show", equal[0])["conflicts"]
        assert (told["key"], told["kind"]) == ("step:3", "session.stepped")
        assert told["kept"][1] == told["position"][1] - 1
        assert "step:3 came again" in stack.dsec("sessions", "show", equal[0]).stdout
        assert stack.json("sessions", "show", equal[1])["conflicts"] == []
        assert stack.json("status")["put_aside"]["conflicts"] == {"session.stepped": 1}
        assert "1 output (session.stepped 1) came a second time" in stack.dsec("status").stdout
    finally:
        with psycopg.connect(stack.json("env", "--owner")["DSEC_DATABASE_URL"]) as connection:
            connection.execute("delete from event_aside where session_id = %s", (equal[0],))


def test_a_second_stack_on_the_directory_is_refused(stack: RunningStack) -> None:
    log = stack.state_dir / "logs" / "up.log"
    before = log.read_bytes()
    said = stack.dsec("up", "--detach", exit_code=1).stderr
    assert "already up" in said
    assert "`dsec status`" in said
    assert "`dsec down`" in said
    assert "whole story" not in said
    assert len(said.strip().splitlines()) == 1
    assert log.read_bytes() == before, "the running stack's own log is left alone"


def test_cancel(stack: RunningStack) -> None:
    file = stack.project / "long.yaml"
    text = session_file(stack, "long").read_text()
    file.write_text(text.replace(f"max_steps: {STEPS}", "max_steps: 100000000"))
    (session_id,) = stack.json("run", str(file))["session_ids"]
    stack.json("sessions", "cancel", session_id)
    until = time.monotonic() + 90
    while (shown := stack.json("sessions", "show", session_id))["status"] != "cancelled":
        assert time.monotonic() < until, shown
        time.sleep(0.1)
    assert (shown["status"], shown["code"]) == ("cancelled", "cancelled")


def test_a_service_that_nobody_declared_is_told_at_the_request(stack: RunningStack) -> None:
    (stack.project / "asking.py").write_text(
        "import dsec\n@dsec.reward(services=['nowhere'])\nasync def asking(t, services):\n"
        "    return (await services['nowhere'].get('/')).json()['worth']\n"
    )
    file = session_file(stack, "asking")
    file.write_text(file.read_text().replace("reward.py:balance", "asking.py:asking"))
    told = stack.dsec("run", str(file))
    assert "'nowhere', which is not declared: `dsec services declare" in told.stderr
    stack.dsec("sessions", "cancel", told.stdout.split()[0])


def test_demo_with_a_worker_killed(stack: RunningStack) -> None:
    told = stack.json("demo")
    assert told["ok"], told["problems"]
    assert len(documented()["demo"]) == 8
    assert set(documented()["demo"]) <= set(told)
    assert (told["sessions"], told["steps"], told["rscr"]) == (20, 50, 1.0)
    assert told["worker_killed"]


def test_validate_determinism(stack: RunningStack) -> None:
    told = stack.json(
        "validate-determinism", "--env", "FrozenLake-v1", "--sessions", "3", "--steps", "30"
    )
    assert (told["ok"], told["sessions"], told["steps"]) == (True, 3, 30)
    assert set(documented()["validate-determinism"]) <= set(told)
    said = stack.dsec("validate-determinism", "--env", "NoSuch-v9", exit_code=1).stderr
    assert "NoSuch-v9" in said


async def test_the_client_reads_episodes_in_columns(
    stack: RunningStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_STATE_DIR", str(stack.state_dir))
    for name in ("DSEC_NATS_URL", "DSEC_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert "DSEC_NATS_URL" not in os.environ
    async with dsec.Client() as client:
        weights = await client.publish_policy("any", {"w": np.arange(3.0)})
        assert weights == await client.publish_policy("any", {"w": np.arange(3.0)})
        group = await client.request(
            session_file(stack, "short"), policy=weights, count=3, seeds="same_env"
        )
        episodes = [episode async for episode in client.episodes(group=group)]
        summaries = await client.wait(group)
    by_session: dict[UUID, int] = {}
    for episode in episodes:
        steps = len(episode.actions)
        by_session[episode.session_id] = by_session.get(episode.session_id, 0) + steps
        assert episode.observations.shape == (steps + 1, 4)
        assert episode.extras["score"].shape == episode.rewards.shape == episode.mask.shape
        assert episode.mask.all()
        assert episode.terminated or episode.truncated
        assert (episode.policy_version, episode.seed, episode.status) == (weights, 7, "completed")
    assert by_session == dict.fromkeys(group.session_ids, STEPS)
    starts = {e.observations[0].tobytes() for e in episodes if e.episode == 0}
    assert len(starts) == 1, "the environment's seed is held"
    assert len({s.chain_hash for s in summaries}) == 3, "the agent's chance is not"


def test_status_says_how_the_log_is_kept(stack: RunningStack) -> None:
    assert "without TimescaleDB" in stack.json("status")["log_storage"]
    assert "without TimescaleDB" in stack.dsec("status").output.replace("\n", " ")
