"""Minari: one episode of its for each of ours that has a step. Made and read by Minari itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dsec.client.endpoints import ClientError
from dsec.client.episodes import Episode
from dsec.client.export import record
from dsec.client.export.kind import Kind, Nothing, column_kind, union
from dsec.client.export.plain_json import json_text
from dsec.client.export.spaces import Bounds, environment, fitting_space
from dsec.client.export.spool import Spool
from dsec.session.seeds import derive

DATA = "data"
VERSION = re.compile(r".*-v\d+")
WITHOUT_STEPS = "dsec_without_steps"
_SPACE_NAMES = ("observations", "actions")


class MinariWriter:
    """Keeps episodes on the disk until all are seen, then has Minari write them.

    Args:
        env_document: gives the document of an environment's spec by its hash; None: unknown.

    Raises:
        ClientError: Minari is not installed.
    """

    def __init__(self, path: Path, env_document: Callable[[str], dict[str, Any] | None]) -> None:
        _require_minari()
        self._path = path
        self._env_document = env_document
        self._spool = Spool(path.parent)
        self._kinds: dict[str, Kind] = dict.fromkeys(_SPACE_NAMES, Nothing())
        self._bounds = {name: Bounds() for name in _SPACE_NAMES}
        self._envs: set[str] = set()
        self._without_steps: list[dict[str, Any]] = []

    def add(self, episode: Episode) -> None:
        """One more episode."""
        if not len(episode.rewards):
            self._without_steps.append(record.scalars(episode))
            return
        if not all(record.observation_mask(episode)):
            raise ClientError(
                f"session {episode.session_id}, episode {episode.episode}: not all observations "
                "were recorded, and Minari needs them; export with --format parquet or jsonl"
            )
        for name in _SPACE_NAMES:
            column = getattr(episode, name)
            self._kinds[name] = union((self._kinds[name], column_kind(column)))
            self._bounds[name].see(column)
        self._envs.add(episode.specs.get("env", ""))
        self._spool.add(episode)

    def finish(self) -> None:
        """Have Minari write them all."""
        from minari.dataset.minari_storage import MinariStorage

        if not self._envs:
            raise ClientError(
                "no session has a step, and Minari has no word for that: export with --format "
                "parquet or jsonl"
            )
        self._path.mkdir()
        spec, observation_space, action_space = self._spaces()
        storage = MinariStorage.new(
            self._path / DATA,
            observation_space=observation_space,
            action_space=action_space,
            env_spec=spec,
            jpeg_encoding=False,  # which would change what was recorded
        )
        storage.update_metadata(
            {
                "dataset_id": _dataset_id(self._path.name),
                "minari_version": _minari_version(),
                WITHOUT_STEPS: json_text(self._without_steps),
            }
        )
        for number, episode in enumerate(self._spool):
            storage.update_episodes([_buffer(episode)])
            storage.update_episode_metadata([_attributes(episode)], [number])

    def _spaces(self) -> tuple[Any, Any, Any]:
        """The environment's own where all episodes are of one that Gymnasium knows."""
        document = self._env_document(next(iter(self._envs))) if len(self._envs) == 1 else None
        found = environment(document) if document is not None else None
        if found is not None:
            return found
        observation_space, action_space = (
            fitting_space(self._kinds[name], self._bounds[name], name) for name in _SPACE_NAMES
        )
        return None, observation_space, action_space

    def close(self) -> None:
        """Let go of the files."""
        self._spool.close()


def _require_minari() -> None:
    try:
        import minari.dataset._storages.hdf5_storage  # noqa: F401
    except ImportError as error:
        raise ClientError(
            f"Minari cannot be loaded ({error}): install it with `pip install 'dsec[minari]'`"
        ) from error


def _minari_version() -> str:
    """What Minari will take as its own when it reads."""
    import minari

    return str(minari.__version__)


def _dataset_id(name: str) -> str:
    plain = re.sub(r"[^-\w]", "-", name)
    return plain if VERSION.fullmatch(plain) else f"{plain}-v0"


def _buffer(episode: Episode) -> Any:
    from minari.data_collector.episode_buffer import EpisodeBuffer

    make: Any = EpisodeBuffer  # whose hints say lists where it takes arrays too
    count = len(episode.rewards)
    last = np.arange(count) == count - 1
    return make(
        # What the environment's reset was given, so that a reader can begin the same episode.
        seed=derive(episode.seed, "env", episode.episode),
        observations=episode.observations,
        actions=episode.actions,
        rewards=episode.rewards,
        terminations=last & episode.terminated,
        truncations=last & episode.truncated,
        infos={
            "reward_mask": episode.mask,
            "components": [json_text(c) for c in episode.components],
            "extras": [json_text(e) for e in record.elements(episode.extras)],
        },
    )


def _attributes(episode: Episode) -> dict[str, Any]:
    """What an episode of Minari says beside its own. None is left out: attributes have none."""
    told = record.scalars(episode)
    told["labels"] = json_text(told["labels"])
    return {f"dsec_{name}": value for name, value in told.items() if value is not None}
