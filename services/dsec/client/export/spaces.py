"""Gymnasium spaces for what was recorded: the environment's own, or the smallest that fit."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from dsec.client.endpoints import ClientError
from dsec.client.export.kind import Array, Kind, Struct, Text

TEXT_CHARS_MAX = 1 << 20
_GYMNASIUM = "gymnasium:"


class Bounds:
    """The shapes and the highest numbers of a column, as far as it was seen, by path."""

    def __init__(self) -> None:
        self.shapes: dict[str, set[tuple[int, ...]]] = {}
        self.low: dict[str, int] = {}
        self.high: dict[str, int] = {}

    def see(self, column: Any, path: str = "") -> None:
        """A column of an episode."""
        if isinstance(column, dict):
            for name, part in column.items():
                self.see(part, f"{path}/{name}")
            return
        shapes = self.shapes.setdefault(path, set())
        if not isinstance(column, np.ndarray):
            shapes.update(np.shape(v) for v in column if isinstance(v, np.ndarray | np.generic))
            return
        shapes.add(column.shape[1:])
        if column.ndim == 1 and column.size and column.dtype.kind in "iu":
            self.low[path] = min(self.low.get(path, 0), int(column.min()))
            self.high[path] = max(self.high.get(path, 0), int(column.max()))


def fitting_space(kind: Kind, bounds: Bounds, what: str, path: str = "") -> spaces.Space[Any]:
    """The smallest space that has all values of a kind.

    Raises:
        ClientError: Minari has no space for them.
    """
    if isinstance(kind, Struct):
        parts = {n: fitting_space(k, bounds, what, f"{path}/{n}") for n, k in kind.fields}
        return spaces.Dict(parts)
    if isinstance(kind, Text):
        return spaces.Text(TEXT_CHARS_MAX)
    shapes = bounds.shapes.get(path, set())
    if isinstance(kind, Array) and len(shapes) == 1:
        dtype = np.dtype(kind.dtype)
        if kind.dimensions == 0 and dtype.kind in "iu" and bounds.low.get(path, 0) >= 0:
            return spaces.Discrete(bounds.high.get(path, 0) + 1)
        if dtype.kind == "b":
            return spaces.MultiBinary(next(iter(shapes)) or 1)
        low, high = (
            (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        )
        return spaces.Box(low, high, next(iter(shapes)), dtype.type)
    raise ClientError(
        f"{what} are of no one shape and type, for which Minari has no space: export them with "
        "--format parquet or jsonl, or fewer sessions (--group, --session)"
    )


def environment(document: dict[str, Any]) -> tuple[EnvSpec, Any, Any] | None:
    """Spec and spaces of an environment of Gymnasium's registry; None for one that is not, or that
    cannot be made here."""
    entry = str(document.get("entry", ""))
    if not re.match(_GYMNASIUM, entry):
        return None
    try:
        env = gymnasium.make(entry.removeprefix(_GYMNASIUM), **document.get("kwargs", {}))
    except (gymnasium.error.Error, ImportError, TypeError, ValueError):
        return None
    try:
        return (env.spec, env.observation_space, env.action_space) if env.spec else None
    finally:
        env.close()
