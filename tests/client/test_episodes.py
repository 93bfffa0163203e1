"""Episodes from rows: whole, cut, failed; nothing made up, nothing left out."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
import pytest

from dsec.client.episodes import Episode, episodes_of, rejected_episode, stacked
from dsec.session.log_row import LogRow
from dsec.session.observations import reference
from dsec_contracts.canonical import encode

SESSION = UUID("01a22b73-29d2-725d-8e5a-7d7fb9de0398")


def row(kind: str, key: str, **columns: Any) -> LogRow:
    """A row of the session."""
    return LogRow(SESSION, key, kind, 1, 1, 0, 0, **columns)


def observed(n: float) -> bytes:
    """An observation as it is recorded."""
    return encode(np.array([n, -n], np.float32))


def log(
    ends: list[bool], *, status: str = "completed", code: str = "max_steps", missing: int = -1
) -> list[LogRow]:
    """A session of `len(ends)` steps; `ends[n]`: step n terminates its episode."""
    rows = [
        row("session.requested", "requested", fact=encode({"seed": 7, "labels": {"a": "b"}})),
        row("session.started", "started", observation=observed(0)),
    ]
    episode = 0
    for n, end in enumerate(ends):
        last = n == len(ends) - 1
        rows.append(
            row(
                "session.stepped",
                f"step:{n}",
                step=n,
                episode=episode,
                terminated=end,
                truncated=False,
                fact=encode([n, episode, [], [], n % 2]),
                observation=observed(n + 1),
                reset_observation=observed(100 + n) if end and not last else None,
                extras=encode({"extras": {"log_prob": -0.5}}),
                policy="p@1",
            )
        )
        if n == missing:
            rows.append(row("reward.missing", f"reward_missing:{n}", step=n))
        else:
            fact = encode([n, 1, float(n), {}, b""])
            rows.append(row("reward.scored", f"reward:{n}.1", step=n, value=float(n), fact=fact))
        episode += end
    rows.append(row("session.ended", "ended", fact=encode({"status": status, "code": code})))
    return rows


def read(rows: list[LogRow]) -> list[Episode]:
    """The episodes of rows that need no blob."""
    return list(episodes_of(SESSION, rows, lambda key: pytest.fail(f"blob {key}")))


def test_whole_and_cut_episodes() -> None:
    first, second = read(log([False, True, False]))
    assert first.observations.shape == (3, 2)
    assert first.observations[:, 0].tolist() == [0, 1, 2]
    assert second.observations[:, 0].tolist() == [101, 3], "the reset comes first"
    assert first.actions.tolist() == [0, 1]
    assert first.rewards.tolist() == [0.0, 1.0]
    assert first.mask.all()
    assert (first.terminated, first.truncated) == (True, False)
    assert (second.terminated, second.truncated) == (False, True), "cut by max_steps"
    assert first.final_observation.tolist() == [2, -2]
    assert first.extras["log_prob"].tolist() == [-0.5, -0.5]
    assert (first.policy_version, first.seed, first.labels) == ("p@1", 7, {"a": "b"})
    assert [e.episode for e in (first, second)] == [0, 1]
    assert second.status == "completed"


def test_the_order_of_rows_does_not_matter() -> None:
    rows = log([False, True, False])
    (a, b), (c, d) = read(rows), read(rows[::-1])
    for one, other in ((a, c), (b, d)):
        np.testing.assert_array_equal(one.observations, other.observations)
        np.testing.assert_array_equal(one.rewards, other.rewards)


def test_a_session_that_ends_with_its_episode_has_no_empty_one() -> None:
    assert len(read(log([False, True]))) == 1


def test_a_missing_reward_is_masked_and_not_zero() -> None:
    (episode,) = read(log([False, False], missing=1))
    assert episode.mask.tolist() == [True, False]
    assert np.isnan(episode.rewards[1])


def test_a_later_revision_of_a_reward_counts() -> None:
    rows = log([False, True])
    fact = encode([1, 2, 9.0, {}, b""])
    rows.insert(0, row("reward.scored", "reward:1.2", step=1, value=9.0, fact=fact))
    (episode,) = read(rows)
    assert episode.rewards.tolist() == [0.0, 9.0]


@pytest.mark.parametrize("ends", [[True], [True, False], []])
def test_a_failure_is_always_seen(ends: list[bool]) -> None:
    found = read(log(ends, status="failed", code="agent_raised"))
    assert [e.status for e in found].count("failed") == 1
    assert (found[-1].status, found[-1].code) == ("failed", "agent_raised")
    assert all(e.status == "completed" and e.code == "" for e in found[:-1])
    assert len(found[-1].rewards) == (1 if ends[-1:] == [False] else 0)


def test_a_session_that_never_started_is_an_empty_episode() -> None:
    rows = [r for r in log([], status="failed", code="agent_load_failed") if r.key != "started"]
    (episode,) = read(rows)
    assert (episode.status, len(episode.rewards), episode.final_observation) == ("failed", 0, None)
    assert rejected_episode(SESSION, "unregistered_spec").code == "unregistered_spec"


def test_a_gap_is_an_error() -> None:
    rows = [r for r in log([False, False, False]) if r.key != "step:1"]
    with pytest.raises(ValueError, match="step 1 is not in the log"):
        read(rows)


def test_observations_by_reference_are_fetched() -> None:
    rows = log([False])
    data = observed(5)
    rows[1] = row("session.started", "started", observation=reference("f" * 64, len(data)))
    (episode,) = episodes_of(SESSION, rows, {"f" * 64: data}.__getitem__)
    assert episode.observations[0].tolist() == [5, -5]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], np.array([1, 2])),
        ([1.5, 2.0], np.array([1.5, 2.0])),
        ([True, False], np.array([True, False])),
        ([np.float32(1), np.float32(2)], np.array([1, 2], np.float32)),
    ],
)
def test_stacking_keeps_the_type(values: list[Any], expected: np.ndarray[Any, Any]) -> None:
    found = stacked(values)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "values",
    [["a", "b"], [1, 2.0], [1, None], [np.zeros(2), np.zeros(3)], [{"a": 1}, {"b": 1}], [2**70]],
)
def test_what_does_not_stack_stays_a_list(values: list[Any]) -> None:
    assert stacked(values) is values


def test_dictionaries_are_stacked_by_key() -> None:
    found = stacked([{"x": np.zeros(2), "t": "a"}, {"x": np.ones(2), "t": "b"}])
    assert found["x"].shape == (2, 2)
    assert found["t"] == ["a", "b"]
