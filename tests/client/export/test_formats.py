"""What is written is what the client gives: any values, missing rewards, failures, cuts."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.client.endpoints import ClientError
from dsec.client.episodes import Episode, episodes_of, rejected_episode
from dsec.client.export.destination import Destination
from dsec.client.export.export import make_writer
from dsec.session.log_row import LogRow
from dsec_contracts.canonical import encode

SESSION = UUID("01a22b73-29d2-725d-8e5a-7d7fb9de0398")


def row(kind: str, key: str, **columns: Any) -> LogRow:
    """A row of the session."""
    return LogRow(SESSION, key, kind, 1, 1, 0, 0, **columns)


def session(
    ends: list[str],
    observations: list[Any],
    actions: list[Any],
    extras: list[Any],
    rewards: list[float | None],
    status: str = "completed",
) -> list[Episode]:
    """The episodes of a session as its log tells it; `ends`: how each step ended, or ''."""
    request = {
        "seed": 7, "labels": {"a": "b"}, "group_id": "g",
        "agent_spec": "a" * 64, "env_spec": "e" * 64, "reward_fn_hash": "r" * 64,
    }  # fmt: skip
    rows = [
        row("session.requested", "requested", fact=encode(request)),
        row("session.started", "started", observation=encode(observations[0]), chain=b"\0" * 32),
    ]
    episode = 0
    for n, end in enumerate(ends):
        reset = observations[(n + 2) % len(observations)]
        rows.append(
            row(
                "session.stepped",
                f"step:{n}",
                step=n,
                episode=episode,
                terminated=end == "terminated",
                truncated=end == "truncated",
                fact=encode([n, episode, [], [], actions[n % len(actions)]]),
                observation=encode(observations[(n + 1) % len(observations)]),
                reset_observation=encode(reset) if end else None,
                extras=None if (e := extras[n % len(extras)]) is None else encode({"extras": e}),
                policy="p@1",
                chain=bytes([n % 256]) * 32,
            )
        )
        value = rewards[n % len(rewards)]
        if value is not None:
            parts = {"x": [value, 0.5], "y": [1.0, 2.0]} if n % 2 else {}
            fact = encode([n, 1, value, parts, b""])
            rows.append(row("reward.scored", f"reward:{n}.1", step=n, value=value, fact=fact))
        episode += bool(end)
    code = "max_steps" if status == "completed" else "agent_raised"
    ended = encode({"status": status, "code": code})
    rows.append(row("session.ended", "ended", fact=ended, chain=b"\xff" * 32))
    return list(episodes_of(SESSION, rows, lambda key: pytest.fail(f"blob {key}")))


def written(format_: str, episodes: Iterable[Episode]) -> list[dict[str, Any]]:
    """Episodes written and read back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        writer = make_writer(format_, path, {})
        for episode in episodes:
            writer.add(episode)
        writer.finish()
        writer.close()
        if format_ == "jsonl":
            return [json.loads(line) for line in path.read_text().splitlines()]
        return list(pq.read_table(path).to_pylist())


# -- comparing ---------------------------------------------------------------------------------


def same(cell: Any, value: Any) -> bool:
    """Whether a cell says what was recorded."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(cell, str) and not (isinstance(value, str) and cell == value):
        if isinstance(value, float) and not math.isfinite(value):
            return cell.strip('"').lower().startswith(repr(value)[:3])
        if isinstance(value, bytes):
            return cell.strip('"') == value.hex()
        try:
            return same(json.loads(cell), value)
        except ValueError:
            return False
    if isinstance(value, float) and isinstance(cell, float):
        return cell == value or (cell != cell and value != value)
    if isinstance(value, dict):
        if not isinstance(cell, dict):
            return False
        keys = {k for k, v in cell.items() if v is not None} | {str(k) for k in value}
        named = {str(k): v for k, v in value.items()}
        return all(same(cell.get(k), named.get(k)) for k in keys)
    if isinstance(value, list | tuple):
        return len(cell) == len(value) and all(map(same, cell, value))
    return type(cell) is type(value) and bool(cell == value)


def apart(column: Any) -> list[Any]:
    """A stacked column, element by element; written anew here, not taken from what is tested."""
    if isinstance(column, dict):
        parts = {k: apart(v) for k, v in column.items()}
        length = len(next(iter(parts.values())))
        return [{k: v[n] for k, v in parts.items()} for n in range(length)]
    return list(column)


def check(cells: dict[str, Any], episode: Episode) -> None:
    """One episode, read back."""
    count = len(episode.actions) if isinstance(episode.actions, list) else len(episode.rewards)
    assert cells["session_id"] == str(episode.session_id)
    for name in ("episode", "status", "code", "terminated", "truncated", "seed", "policy_version",
                 "first_step", "chain_hash", "group_id"):  # fmt: skip
        assert cells[name] == getattr(episode, name), name
    assert dict(cells["labels"]) == episode.labels
    assert cells["env_spec"] == episode.specs.get("env")
    assert cells["steps"] == count == len(cells["rewards"])
    assert cells["reward_mask"] == episode.mask.tolist()
    for reward, value, there in zip(cells["rewards"], episode.rewards, episode.mask, strict=True):
        assert same(reward, value) if there else reward is None
    for cell, components in zip(cells["components"], episode.components, strict=True):
        if components is None:
            assert cell is None
            continue
        pairs = {k: (v["score"], v["weight"]) if isinstance(v, dict) else tuple(v)
                 for k, v in dict(cell).items()}  # fmt: skip
        assert same(pairs, components)
    observations = apart(episode.observations)
    assert same(cells["observations"], observations)
    assert cells["observation_mask"] == [o is not None for o in observations]
    assert same(cells["final_observation"], episode.final_observation)
    for n, action in enumerate(apart(episode.actions)):
        given, params = action, None
        if isinstance(action, dict) and set(action) == {"action", "action_params"}:
            given, params = action["action"], action["action_params"]
        assert same(cells["actions"][n], given)
        assert same(cells["action_params"][n], params)
    assert same(cells["extras"], apart(episode.extras))


# -- any values --------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(width=64), st.booleans(), st.none(),
    st.text(max_size=5), st.binary(max_size=3), st.floats(width=32).map(np.float32),
)  # fmt: skip
arrays = st.one_of(
    st.lists(st.floats(width=32), min_size=2, max_size=2).map(lambda v: np.array(v, np.float32)),
    st.lists(st.integers(0, 255), max_size=4).map(lambda v: np.array(v, np.uint8)),
    st.integers(0, 9).map(lambda v: np.full((2, 3), v, np.int16)),
)
values = st.recursive(
    numbers | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "y", "é"]), inner, max_size=3)
    ),
    max_leaves=3,
)
alike = st.one_of(
    st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3).map(np.array), min_size=1),
    st.lists(st.fixed_dictionaries({"p": st.floats(), "k": st.integers(0, 9)}), min_size=1),
    st.lists(st.integers(0, 5), min_size=1),
    st.lists(st.text(max_size=4), min_size=1),
)
columns = alike | st.lists(values, min_size=1, max_size=5)
sessions = st.builds(
    session,
    ends=st.lists(st.sampled_from(["", "", "terminated", "truncated"]), max_size=6),
    observations=columns,
    actions=columns
    | st.lists(st.fixed_dictionaries({"action": values, "action_params": values}), min_size=1),
    extras=columns,
    rewards=st.lists(st.none() | st.floats(), min_size=1, max_size=5),
    status=st.sampled_from(["completed", "failed", "cancelled"]),
).filter(bool)


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(sessions, min_size=1, max_size=2))
def test_what_is_written_is_what_the_client_gives(format_: str, found: list[list[Episode]]) -> None:
    episodes = [episode for of_one in found for episode in of_one]
    cells = written(format_, episodes)
    assert len(cells) == len(episodes)
    for cell, episode in zip(cells, episodes, strict=True):
        check(cell, episode)


# -- what people rely on -----------------------------------------------------------------------

OBSERVATIONS = [np.array([n, -n], np.float32) for n in range(9)]


def cart(ends: list[str], **other: Any) -> list[Episode]:
    """A session with ordinary values."""
    return session(
        ends,
        **{
            "observations": OBSERVATIONS, "actions": [0, 1], "extras": [{"log_prob": -0.5}],
            "rewards": [1.0], **other,
        },
    )  # fmt: skip


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_a_missing_reward_is_null_and_masked(format_: str) -> None:
    (cells,) = written(format_, cart(["", ""], rewards=[0.0, None]))
    assert cells["rewards"] == [0.0, None]
    assert cells["reward_mask"] == [True, False]
    assert cells["components"][1] is None


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_failures_and_cuts_are_explicit(format_: str) -> None:
    failed = cart(["", ""], status="failed")
    cut = cart(["terminated", ""])
    refused = rejected_episode(SESSION, "spec_not_found")
    cells = written(format_, [*failed, *cut, refused])
    told = [(c["status"], c["code"], c["terminated"], c["truncated"], c["steps"]) for c in cells]
    assert told == [
        ("failed", "agent_raised", False, False, 2),
        ("completed", "max_steps", True, False, 1),
        ("completed", "max_steps", False, True, 1),
        ("rejected", "spec_not_found", False, False, 0),
    ]
    assert cells[0]["chain_hash"] == "ff" * 32


def test_parquet_has_the_types_of_what_was_recorded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.parquet"
        writer = make_writer("parquet", path, {})
        for episode in [*cart(["", "terminated"]), rejected_episode(SESSION, "x")]:
            writer.add(episode)
        writer.finish()
        schema = pq.read_schema(path)
    assert str(schema.field("observations").type) == "list<element: list<element: float>>"
    assert str(schema.field("actions").type) == "list<element: int64>"
    assert str(schema.field("extras").type) == "list<element: struct<log_prob: double>>"


def test_large_episodes_are_written_in_several_row_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("dsec.client.export.parquet.ROW_GROUP_BYTES_MAX", 1000)
    writer = make_writer("parquet", tmp_path / "out", {})
    for episode in cart(["terminated"] * 40):
        writer.add(episode)
    writer.finish()
    assert pq.ParquetFile(tmp_path / "out").num_row_groups > 1
    assert pq.read_table(tmp_path / "out").num_rows == 40


# -- the place ---------------------------------------------------------------------------------


def test_a_place_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"

    def fails() -> None:
        with Destination(path, folder=False, force=False) as destination:
            destination.draft.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert list(path.parent.iterdir()) == []
    with Destination(path, folder=False, force=False) as destination:
        destination.draft.write_text("whole")
        assert not path.exists()
        assert destination.commit() == 5
    assert [p.name for p in path.parent.iterdir()] == ["out.jsonl"]


def test_nothing_is_replaced_by_accident(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Destination(path, folder=False, force=False) as destination:
        destination.draft.write_text("new")
        path.write_text("came meanwhile")
        with pytest.raises(ClientError, match="there already"):
            destination.commit()
    assert path.read_text() == "came meanwhile"
    with pytest.raises(ClientError, match="--force"):
        Destination(path, folder=False, force=False)
    with Destination(path, folder=False, force=True) as destination:
        destination.draft.write_text("new")
        destination.commit()
    assert path.read_text() == "new"


@pytest.mark.parametrize("folder", [True, False])
def test_a_folder_of_somebody_elses_is_never_replaced(tmp_path: Path, folder: bool) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("")
    with pytest.raises(ClientError, match="no export made"):
        Destination(tmp_path / "home", folder=folder, force=True)
    assert (tmp_path / "home" / "thesis").exists()


@pytest.mark.parametrize(
    ("actions", "cells"),
    [
        ([2**70, 1], [str(2**70), "1"]),
        ([1, 2.5], ["1", "2.5"]),
        ([{"a": 1}, {"b": 2}], [{"a": 1, "b": None}, {"a": None, "b": 2}]),
        ([{}, {}], ["{}", "{}"]),
        ([{"action": 1, "action_params": {"p": 2}}, 3], [1, 3]),
    ],
)
def test_values_without_a_common_type_are_kept(actions: list[Any], cells: list[Any]) -> None:
    (found,) = written("parquet", cart(["", ""], actions=actions))
    assert found["actions"] == cells


@pytest.mark.parametrize("format_", ["parquet", "jsonl"])
def test_parameters_of_actions_stand_beside_them(format_: str) -> None:
    with_params = [{"action": n, "action_params": {"p": n / 2}} for n in range(2)]
    (cells,) = written(format_, cart(["", ""], actions=with_params))
    assert cells["actions"] == [0, 1]
    assert cells["action_params"] == [{"p": 0.0}, {"p": 0.5}]
