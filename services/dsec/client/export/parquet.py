"""Parquet: one row an episode, columns of lists. The types are those of what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dsec.client.episodes import Episode
from dsec.client.export import record
from dsec.client.export.arrow import arrow_column, one_cell
from dsec.client.export.kind import Kind, Nothing, arrow_type, column_kind, kind_of, union
from dsec.client.export.spool import Spool

ROW_GROUP_BYTES_MAX = 32 << 20
VALUES = ("observations", "final_observation", "actions", "action_params", "extras")
_COMPONENT = pa.struct([("score", pa.float64()), ("weight", pa.float64())])
_SCALARS = (
    ("session_id", pa.string()),
    ("episode", pa.int64()),
    ("status", pa.string()),
    ("code", pa.string()),
    ("steps", pa.int64()),
    ("first_step", pa.int64()),
    ("terminated", pa.bool_()),
    ("truncated", pa.bool_()),
    ("seed", pa.int64()),
    ("policy_version", pa.string()),
    ("group_id", pa.string()),
    ("labels", pa.map_(pa.string(), pa.string())),
    ("agent_spec", pa.string()),
    ("env_spec", pa.string()),
    ("reward_spec", pa.string()),
    ("chain_hash", pa.string()),
)
_MASKED = (
    ("rewards", pa.list_(pa.float64())),
    ("reward_mask", pa.list_(pa.bool_())),
    ("components", pa.list_(pa.map_(pa.string(), _COMPONENT))),
    ("observation_mask", pa.list_(pa.bool_())),
)


class ParquetWriter:
    """Keeps episodes on the disk until all are seen, then writes them in row groups."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spool = Spool(path.parent)
        self._kinds: dict[str, Kind] = dict.fromkeys(VALUES, Nothing())

    def add(self, episode: Episode) -> None:
        """One more episode."""
        for name, kind in _kinds(episode).items():
            self._kinds[name] = union((self._kinds[name], kind))
        self._spool.add(episode)

    def finish(self) -> None:
        """Write them all."""
        schema = _schema(self._kinds)
        with pq.ParquetWriter(self._path, schema, compression="zstd") as file:
            held: list[pa.RecordBatch] = []
            held_bytes = 0
            for episode in self._spool:
                held.append(_row(episode, self._kinds, schema))
                held_bytes += held[-1].nbytes
                if held_bytes > ROW_GROUP_BYTES_MAX:
                    file.write_table(pa.Table.from_batches(held, schema))
                    held, held_bytes = [], 0
            if held:
                file.write_table(pa.Table.from_batches(held, schema))

    def close(self) -> None:
        """Let go of the files."""
        self._spool.close()


def _kinds(episode: Episode) -> dict[str, Kind]:
    actions, params = record.actions(episode)
    observations = column_kind(episode.observations)
    return {
        "observations": observations,
        "final_observation": union((observations, kind_of(episode.final_observation))),
        "actions": column_kind(actions),
        "action_params": Nothing() if params is None else column_kind(params),
        "extras": column_kind(episode.extras),
    }


def _schema(kinds: dict[str, Kind]) -> pa.Schema:
    values = {name: arrow_type(kind) for name, kind in kinds.items()}
    lists = [
        (name, found if name == "final_observation" else pa.list_(found))
        for name, found in values.items()
    ]
    return pa.schema([*_SCALARS, *_MASKED, *lists])


def _row(episode: Episode, kinds: dict[str, Kind], schema: pa.Schema) -> pa.RecordBatch:
    """An episode as a batch of one row."""
    scalars: dict[str, Any] = record.scalars(episode)
    scalars["labels"] = list(episode.labels.items())
    components = [None if c is None else _component_cell(c) for c in episode.components]
    masked = {
        "rewards": record.rewards(episode),
        "reward_mask": episode.mask.tolist(),
        "components": components,
        "observation_mask": record.observation_mask(episode),
    }
    cells = {
        name: pa.array([value], schema.field(name).type)
        for name, value in {**scalars, **masked}.items()
    }
    actions, params = record.actions(episode)
    columns = {
        "observations": episode.observations,
        "actions": actions,
        "action_params": [None] * len(episode.rewards) if params is None else params,
        "extras": episode.extras,
    }
    for name, column in columns.items():
        cells[name] = one_cell(arrow_column(column, kinds[name]))
    last = [episode.final_observation]
    cells["final_observation"] = arrow_column(last, kinds["final_observation"])
    arrays = [cells[field.name] for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _component_cell(components: dict[str, tuple[float, float]]) -> list[tuple[str, Any]]:
    return [
        (name, {"score": score, "weight": weight}) for name, (score, weight) in components.items()
    ]
