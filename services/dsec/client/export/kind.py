"""What kind of values a column holds, found by looking at all of them, and as Arrow types.

Kinds of two values are united into one that holds both; where there is none, values are kept as
JSON texts, so that no episode is refused for what its agent or environment happened to give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Array:
    """Numbers or truth values in `dimensions` dimensions, 0 for a single one; shapes may differ."""

    dtype: str
    dimensions: int


@dataclass(frozen=True, slots=True)
class Struct:
    """Named values, in the order in which names were met. A name that a value lacks is null."""

    fields: tuple[tuple[str, Kind], ...]


@dataclass(frozen=True, slots=True)
class Nothing:
    """No value was seen yet."""


@dataclass(frozen=True, slots=True)
class Text:
    """Texts."""


@dataclass(frozen=True, slots=True)
class Json:
    """Anything, as a JSON text."""


Kind = Array | Struct | Nothing | Text | Json
_INT, _FLOAT, _BOOL = Array("int64", 0), Array("float64", 0), Array("bool", 0)


def kind_of(value: Any) -> Kind:
    """The kind of one value."""
    if value is None:
        return Nothing()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        fits = value.dtype.itemsize <= 8 and value.dtype.isnative
        return Array(value.dtype.name, value.ndim) if fits else Json()
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _INT if value in _INT64 else Json()
    if isinstance(value, float):
        return _FLOAT
    if isinstance(value, str):
        return Text() if _is_unicode(value) else Json()
    if isinstance(value, dict) and value and all(map(_is_name, value)):
        return Struct(tuple((name, kind_of(item)) for name, item in value.items()))
    return Json()


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and _is_unicode(key)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def column_kind(column: Any) -> Kind:
    """The kind of the elements of an episode's column, as `stacked` gives it."""
    if isinstance(column, dict):
        if not all(map(_is_name, column)):
            return Json()
        return Struct(tuple((name, column_kind(part)) for name, part in column.items()))
    if isinstance(column, np.ndarray):
        return kind_of(column[0]) if len(column) else Nothing()
    return union(map(kind_of, column))


def union(kinds: Iterable[Kind]) -> Kind:
    """The kind that holds what all of these hold."""
    found: Kind = Nothing()
    for kind in kinds:
        if kind != found:
            found = _both(found, kind)
    return found


def _both(one: Kind, other: Kind) -> Kind:
    if isinstance(one, Nothing):
        return other
    if isinstance(other, Nothing) or one == other:
        return one
    if isinstance(one, Struct) and isinstance(other, Struct):
        fields: Mapping[str, Kind] = dict(one.fields)
        merged = {**fields}
        for name, kind in other.fields:
            merged[name] = union((merged.get(name, Nothing()), kind))
        return Struct(tuple(merged.items()))
    return Json()


def arrow_type(kind: Kind) -> pa.DataType:
    """The Arrow type of a kind."""
    if isinstance(kind, Array):
        found = pa.from_numpy_dtype(np.dtype(kind.dtype))
        for _ in range(kind.dimensions):
            found = pa.list_(found)
        return found
    if isinstance(kind, Struct):
        return pa.struct([pa.field(name, arrow_type(part)) for name, part in kind.fields])
    return pa.null() if isinstance(kind, Nothing) else pa.string()
