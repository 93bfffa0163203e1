"""Columns of episodes as Arrow arrays of a known kind. Stacked arrays are copied whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from dsec.client.export.kind import Array, Json, Kind, Struct, arrow_type
from dsec.client.export.plain_json import json_text
from dsec.client.export.record import elements


def arrow_column(column: Any, kind: Kind) -> pa.Array:
    """The elements of a column, as `stacked` gives it, in their order."""
    if isinstance(kind, Array) and isinstance(column, np.ndarray) and column.ndim > 0:
        return _nested(column)
    if isinstance(kind, Struct) and isinstance(column, dict):
        return _struct(column, kind)
    values = [_cell(value, kind) for value in elements(column)]
    return pa.array(values, arrow_type(kind))


def one_cell(values: pa.Array) -> pa.Array:
    """An array of one list, which has all the values."""
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _nested(array: np.ndarray[Any, Any]) -> pa.Array:
    """[n, d1, ..., dk] as n lists, k deep."""
    values = pa.array(np.ascontiguousarray(array).reshape(-1))
    lengths = list(array.shape)
    while len(lengths) > 1:
        size = lengths.pop()
        offsets = np.arange(int(np.prod(lengths)) + 1, dtype=np.int32) * size
        values = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
    return values


def _struct(column: dict[str, Any], kind: Struct) -> pa.Array:
    count = len(elements(column))
    parts = [
        arrow_column(column[name], part) if name in column else pa.nulls(count, arrow_type(part))
        for name, part in kind.fields
    ]
    fields = list(arrow_type(kind))
    return pa.StructArray.from_arrays(parts, fields=fields)


def _cell(value: Any, kind: Kind) -> Any:
    """One value as Arrow's own constructor takes it."""
    if isinstance(kind, Json):
        return None if value is None else json_text(value)
    if value is None:
        return None
    if isinstance(kind, Struct):
        return {name: _cell(value.get(name), part) for name, part in kind.fields}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
