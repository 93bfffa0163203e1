"""JSON lines: one episode a line, in ASCII."""

from __future__ import annotations

from pathlib import Path

from dsec.client.episodes import Episode
from dsec.client.export import record
from dsec.client.export.plain_json import json_text


class JsonlWriter:
    """Writes to a file; nothing is kept."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="ascii", newline="\n")

    def add(self, episode: Episode) -> None:
        """One more episode."""
        actions, params = record.actions(episode)
        count = len(episode.rewards)
        line = {
            **record.scalars(episode),
            "rewards": record.rewards(episode),
            "reward_mask": episode.mask,
            "components": episode.components,
            "observations": record.elements(episode.observations),
            "observation_mask": record.observation_mask(episode),
            "final_observation": episode.final_observation,
            "actions": record.elements(actions),
            "action_params": [None] * count if params is None else record.elements(params),
            "extras": record.elements(episode.extras),
        }
        self._file.write(f"{json_text(line)}\n")

    def finish(self) -> None:
        """Everything is in the file."""
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
