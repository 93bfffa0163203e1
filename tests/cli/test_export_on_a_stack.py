"""`dsec export` and `dsec doctor` on a running stack: what is written is what the client gives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

import pyarrow.parquet as pq
import pytest

import dsec

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]

STEPS = 40
AGENT = """
class A:
    n = 0
    def __init__(self, config): ...
    def step(self, observation):
        self.n += 1
        if self.n > {last}: raise ValueError("out of luck")
        return {{"action": self.n % 2, "extras": {{"n": self.n}}}}
"""


class RunningStack(Protocol):
    """See conftest.py."""

    state_dir: Path
    project: Path

    def dsec(self, *arguments: str, exit_code: int = 0) -> Any: ...
    def json(self, *arguments: str, exit_code: int = 0) -> Any: ...


@pytest.fixture(scope="module")
def ids(stack: RunningStack) -> list[str]:
    """Two sessions that completed and one whose agent raised at its sixth step."""
    found: list[str] = []
    for name, last, count in (("whole", 10_000, 2), ("broken", 5, 1)):
        folder = stack.project
        (folder / f"{name}_agent.py").write_text(AGENT.format(last=last))
        spec = f"entry: {name}_agent.py:A\ncode: ['{name}_agent.py']\n"
        (folder / f"{name}_agent.yaml").write_text(spec)
        (folder / f"export_{name}.yaml").write_text(
            f"agent: {name}_agent.yaml\nenv: env_spec.yaml\nreward: reward.py:balance\nseed: 3\n"
            f"max_steps: {STEPS}\nlabels: {{of: exports}}\n"
        )
        file = str(folder / f"export_{name}.yaml")
        code = 0 if name == "whole" else 1
        told = stack.json("run", file, "--count", str(count), "--follow", exit_code=code)
        found += [str(i) for i in told.get("session_ids") or [told["sessions"][0]["session_id"]]]
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an export."""
    if path.suffix == ".parquet":
        return list(pq.read_table(path).to_pylist())
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_files_have_what_the_client_gives(
    stack: RunningStack,
    ids: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format_: str,
) -> None:
    out = tmp_path / f"e.{format_}"
    arguments = ("export", "--format", format_, "--out", str(out), "--label", "of=exports")
    told = stack.json(*arguments)
    rows = rows_of(out)
    again = tmp_path / f"again.{format_}"
    stack.json(*arguments[:4], str(again), *arguments[5:], "--as-of", told["as_of"])
    assert rows_of(again) == rows
    stack.dsec(*arguments[:4], str(again), *arguments[5:], "--as-of", "1:1", exit_code=1)
    given = _episodes(stack, ids, monkeypatch)
    assert len(rows) == len(given) == told["episodes"]
    for row, episode in zip(rows, given, strict=True):
        assert row["session_id"] == str(episode.session_id)
        assert (row["status"], row["code"]) == (episode.status, episode.code)
        assert (row["terminated"], row["truncated"]) == (episode.terminated, episode.truncated)
        assert row["rewards"] == episode.rewards.tolist()
        assert row["observations"] == episode.observations.tolist()
        assert row["final_observation"] == episode.final_observation.tolist()
        assert row["actions"] == episode.actions.tolist()
        assert [extra["n"] for extra in row["extras"]] == episode.extras["n"].tolist()
        assert (row["chain_hash"], row["first_step"]) == (episode.chain_hash, episode.first_step)
    assert told["statuses"] == {"completed": 2, "failed": 1}
    assert (told["steps"], told["unfinished"]) == (2 * STEPS + 5, 0)
    assert told["bytes"] == out.stat().st_size
    shown = {s["session_id"]: s for s in stack.json("sessions", "list", "--limit", "1000")}
    assert {r["chain_hash"] for r in rows} == {shown[i]["chain_hash"] for i in ids}
    assert told["reward_total"] == pytest.approx(sum(shown[i]["reward_total"] for i in ids))
    assert "there already" in stack.dsec(*arguments, exit_code=1).stderr
    assert stack.json(*arguments, "--force")["episodes"] == len(rows)
    assert "no session matches" in stack.dsec(
        "export", "--format", format_, "--out", str(tmp_path / "x"), "--label", "of=nothing",
        exit_code=1,
    ).stderr  # fmt: skip
    assert not (tmp_path / "x").exists()


def _episodes(
    stack: RunningStack, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> list[dsec.Episode]:
    monkeypatch.setenv("DSEC_STATE_DIR", str(stack.state_dir))
    for name in ("DSEC_NATS_URL", "DSEC_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)

    async def read() -> list[dsec.Episode]:
        async with dsec.Client() as client:
            return [e async for e in client.episodes([UUID(i) for i in sorted(ids)])]

    return asyncio.run(read())


def test_single_sessions_and_minari(stack: RunningStack, ids: list[str], tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    out = tmp_path / "cart-v3"
    told = stack.json(
        "export", "--format", "minari", "--out", str(out), "--session", ids[0], "--session", ids[2]
    )
    found = minari.MinariDataset(out / "data")
    assert (found.total_episodes, found.total_steps) == (told["episodes"], told["steps"])
    rewards = sum(float(episode.rewards.sum()) for episode in found.iterate_episodes())
    assert rewards == pytest.approx(told["reward_total"])
    assert found.env_spec.id == "CartPole-v1"
    assert found.spec.dataset_id == "cart-v3"
    assert told["steps"] == STEPS + 5


def test_the_doctor_finds_the_stack_well(stack: RunningStack) -> None:
    told = stack.json("doctor")
    found = {check["name"]: check for check in told["checks"]}
    for name in ("nats", "nats_stream", "nats_sync", "nats_clock", "database",
                 "database_durability", "database_clock", "object_store", "ports"):  # fmt: skip
        assert found[name]["status"] == "ok", found[name]
    assert found["nats_sync"]["facts"]["sync_interval_s"] == 1.0
    assert told["ok"] is True
