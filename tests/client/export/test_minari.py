"""A Minari dataset: Minari itself opens it, and finds the same episodes and totals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import gymnasium
import numpy as np
import pytest

from dsec.client.endpoints import ClientError
from dsec.client.episodes import Episode, rejected_episode
from dsec.client.export.export import make_writer
from dsec.session.seeds import derive

minari = pytest.importorskip("minari")

SPEC = "e" * 64


def episode(number: int, steps: int, **other: Any) -> Episode:
    """An episode of CartPole's shapes; the last reward of an odd one is missing."""
    mask = np.ones(steps, np.bool_)
    mask[-1:] = number % 2 == 0
    observations = np.full((steps + 1, 4), number, np.float32)
    found: dict[str, Any] = {
        "session_id": UUID(int=number),
        "episode": number,
        "observations": observations,
        "actions": np.arange(steps) % 2,
        "rewards": np.where(mask, 1.0, np.nan),
        "mask": mask,
        "terminated": number % 2 == 0,
        "truncated": number % 2 == 1,
        "final_observation": observations[-1],
        "extras": [{"log_prob": -0.5}] * steps,
        "policy_version": None,
        "seed": 7,
        "components": [{"x": (1.0, 1.0)} if there else None for there in mask],
        "specs": {"env": SPEC},
        "labels": {"a": "b"},
    }
    return Episode(**{**found, **other})


def dataset(folder: Path, episodes: list[Episode], documents: Any = None) -> Any:
    """Written by us, opened by Minari."""
    writer = make_writer("minari", folder / "some set", documents or {})
    for each in episodes:
        writer.add(each)
    writer.finish()
    writer.close()
    return minari.MinariDataset(folder / "some set" / "data")


def test_minari_opens_it_and_finds_the_same(tmp_path: Path) -> None:
    document = {"entry": "gymnasium:CartPole-v1", "kwargs": {}}
    given = [episode(n, 3 + n) for n in range(4)]
    found = dataset(tmp_path, [*given, rejected_episode(UUID(int=9), "x")], {SPEC: document})
    assert (found.total_episodes, found.total_steps) == (4, sum(3 + n for n in range(4)))
    assert found.spec.dataset_id == "some-set-v0"
    assert isinstance(found.recover_environment().action_space, gymnasium.spaces.Discrete)
    for ours, theirs in zip(given, found.iterate_episodes(), strict=True):
        np.testing.assert_array_equal(theirs.observations, ours.observations)
        np.testing.assert_array_equal(theirs.actions, ours.actions)
        np.testing.assert_array_equal(theirs.rewards, ours.rewards)
        np.testing.assert_array_equal(theirs.infos["reward_mask"], ours.mask)
        assert theirs.terminations.tolist() == [False] * (len(ours.mask) - 1) + [ours.terminated]
        assert theirs.truncations.tolist() == [False] * (len(ours.mask) - 1) + [ours.truncated]
        assert json.loads(theirs.infos["extras"][0]) == {"log_prob": -0.5}
    attributes = next(iter(found.storage.get_episode_metadata([1])))
    assert attributes["dsec_session_id"] == str(UUID(int=1))
    assert attributes["seed"] == derive(7, "env", 1)
    left = json.loads(found.storage.metadata["dsec_without_steps"])
    assert [(each["status"], each["code"]) for each in left] == [("rejected", "x")]


def test_spaces_are_found_where_the_environment_is_not_known(tmp_path: Path) -> None:
    found = dataset(tmp_path, [episode(0, 4), episode(1, 4, actions=np.array([0, 5, 0, 1]))])
    assert found.action_space == gymnasium.spaces.Discrete(6)
    assert (found.observation_space.shape, found.observation_space.dtype) == ((4,), np.float32)
    assert found.env_spec is None


def test_dictionaries_and_images_are_kept_exactly(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (3, 40, 40, 3), np.uint8)
    observations = {"camera": images, "speed": np.array([0.5, 1.5, 2.5])}
    found = dataset(tmp_path, [episode(0, 2, observations=observations)])
    (read,) = found.iterate_episodes()
    np.testing.assert_array_equal(read.observations["camera"], images)
    np.testing.assert_array_equal(read.observations["speed"], observations["speed"])


@pytest.mark.parametrize(
    ("episodes", "told"),
    [
        ([episode(0, 2, observations=[np.zeros(2), None, None])], "not all observations"),
        ([episode(0, 1), episode(0, 1, observations=np.zeros((2, 9), np.float32))], "no one shape"),
        ([rejected_episode(UUID(int=9), "x")], "no session has a step"),
    ],
)
def test_what_minari_cannot_hold_is_refused(
    tmp_path: Path, episodes: list[Episode], told: str
) -> None:
    with pytest.raises(ClientError, match=told) as caught:
        dataset(tmp_path, episodes)
    assert "parquet or jsonl" in str(caught.value)
