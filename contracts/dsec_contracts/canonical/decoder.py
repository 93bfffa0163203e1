"""`decode`: from canonical bytes to the value. Takes only what `encode` writes.

The bytes may come from anybody, so every length is held against the bytes that are left before
anything is made, and whatever is wrong is a `CanonicalError`. Strictness is what makes equality of
bytes and equality of values the same thing: for all bytes that are taken, `encode(decode(b)) == b`.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from dsec_contracts.canonical.arrays import read_nd, read_np, read_torch
from dsec_contracts.canonical.form import NAN, NESTING_DEPTH_MAX, CanonicalError, check_named
from dsec_contracts.canonical.primitives import (
    Read,
    argument,
    check_parts,
    expect,
    read_bytes,
    read_text,
    take,
    utf8,
)

_SIMPLE = {0xF4: False, 0xF5: True, 0xF6: None}
_DOUBLE = struct.Struct(">d").unpack_from


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value that `data` is the canonical encoding of. Arrays come back writable.

    Raises:
        CanonicalError: the bytes are cut short, too deep, have more behind them, or use a form
            that `encode` never writes.
    """
    if type(data) is not bytes:
        data = bytes(data)
    try:
        value, end = _read(data, 0, 0)
    except (IndexError, struct.error):
        raise CanonicalError("the bytes end in the middle of a value") from None
    if end != len(data):
        raise CanonicalError(f"{len(data) - end} bytes follow the value")
    return value


def _read(data: bytes, at: int, depth: int) -> Read:
    first = data[at]
    at += 1
    major = first >> 5
    if major == 7:
        return _read_simple(data, at, first)
    n, at = argument(data, at, first & 31)
    if major == 0:
        return n, at
    if major == 1:
        return -1 - n, at
    if major == 2:
        return take(data, at, n)
    if major == 3:
        return utf8(data, at, n)
    if major == 6:
        return _read_tag(data, at, n, depth)
    _check_depth(depth)
    if major == 4:
        return _read_items(data, at, n, depth)
    return _read_map(data, at, n, depth)


def _check_depth(depth: int) -> None:
    if depth >= NESTING_DEPTH_MAX:
        raise CanonicalError(f"is nested deeper than {NESTING_DEPTH_MAX} containers")


def _read_simple(data: bytes, at: int, first: int) -> Read:
    if first == 0xFB:
        value = _DOUBLE(data, at)[0]
        if value != value and data[at : at + 8] != NAN[1:]:
            raise CanonicalError(f"a NaN at byte {at - 1} is not the canonical one")
        return value, at + 8
    if first not in _SIMPLE:
        raise CanonicalError(f"byte {first:#04x} at {at - 1} is no form that DSec writes")
    return _SIMPLE[first], at


def _read_items(data: bytes, at: int, n: int, depth: int) -> tuple[list[Any], int]:
    if n > len(data) - at:
        raise IndexError
    items = []
    depth += 1
    for _ in range(n):
        item, at = _read(data, at, depth)
        items.append(item)
    return items, at


def _read_map(data: bytes, at: int, n: int, depth: int) -> Read:
    if 2 * n > len(data) - at:
        raise IndexError
    result: dict[Any, Any] = {}
    previous = b""
    depth += 1
    for count in range(1, n + 1):
        start = at
        key, at = _read(data, at, depth)
        previous = _check_order(previous, data[start:at], start)
        if type(key) is not str:
            key = _hashable(key, start)
        result[key], at = _read(data, at, depth)
        # 1, 1.0 and true have different bytes and are one key to Python.
        if len(result) != count:
            raise CanonicalError(f"the map key at byte {start} equals another one")
    return result, at


def _check_order(previous: bytes, encoded: bytes, at: int) -> bytes:
    if encoded <= previous:
        raise CanonicalError(f"map keys or set members at byte {at} are not in order")
    return encoded


def _hashable(value: Any, at: int) -> Any:
    """`value` as a map key or a set's member: sets in it become frozen ones."""
    try:
        value = _frozen(value)
        hash(value)
    except (TypeError, ValueError):
        raise CanonicalError(f"a map key or set member at byte {at} is not hashable") from None
    return value


def _frozen(value: Any) -> Any:
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, tuple):
        items = map(_frozen, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _read_tag(data: bytes, at: int, tag: int, depth: int) -> Read:
    if tag in (2, 3):
        body, end = read_bytes(data, at, "a bignum")
        if len(body) <= 8 or body[0] == 0:
            raise CanonicalError(f"a bignum at byte {at} is not in its shortest form")
        n = int.from_bytes(body, "big")
        return (n if tag == 2 else -1 - n), end
    if tag != 27:
        raise CanonicalError(f"tag {tag} before byte {at} is no form that DSec writes")
    start = at
    n, at = expect(data, at, 4, "an object's array")
    if n == 0:
        raise CanonicalError(f"an object at byte {start} has no name")
    name, at = read_text(data, at, "an object's name")
    reader = _OBJECTS.get(name)
    if reader is None:
        raise CanonicalError(f"object type {name[:100]!r} at byte {start} is not known")
    return reader(data, at, n - 1, depth)


def _read_tuple(data: bytes, at: int, n: int, depth: int) -> Read:
    _check_depth(depth)
    items, at = _read_items(data, at, n, depth)
    return tuple(items), at


def _read_wtf8(data: bytes, at: int, n: int, depth: int) -> Read:
    check_parts("wtf8", n, 1, at)
    raw, end = read_bytes(data, at, "the bytes of a text")
    try:
        value = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CanonicalError(f"text at byte {at} is not UTF-8: {error.reason}") from None
    if not any("\ud800" <= c <= "\udfff" for c in value):
        raise CanonicalError(f"text at byte {at} has no surrogate and is no plain text")
    return value, end


def _read_set(data: bytes, at: int, n: int, depth: int) -> Read:
    _check_depth(depth)
    result: set[Any] = set()
    previous = b""
    for count in range(1, n + 1):
        start = at
        item, at = _read(data, at, depth + 1)
        previous = _check_order(previous, data[start:at], start)
        result.add(_hashable(item, start))
        if len(result) != count:
            raise CanonicalError(f"the set member at byte {start} equals another one")
    return result, at


def _read_named(data: bytes, at: int, n: int, depth: int) -> Read:
    _check_depth(depth)
    start = at
    name, at = read_text(data, at, "the name of a named tuple")
    count, at = expect(data, at, 4, "the fields of a named tuple")
    check_parts("named", n, count + 2, start)
    fields = []
    for _ in range(count):
        field, at = read_text(data, at, "a field's name")
        fields.append(field)
    items, at = _read_items(data, at, count, depth)
    return _named(name, tuple(fields))(*items), at


_OBJECTS: dict[str, Callable[[bytes, int, int, int], Read]] = {
    "tuple": _read_tuple,
    "wtf8": _read_wtf8,
    "set": _read_set,
    "named": _read_named,
    "nd": read_nd,
    "np": read_np,
    "torch": read_torch,
}


@lru_cache(maxsize=256)
def _named(name: str, fields: tuple[str, ...]) -> Any:
    check_named(name, fields)
    try:
        return namedtuple(name, fields, rename=True)
    except (SyntaxError, ValueError):  # two names that Python's parser takes for one
        raise CanonicalError(f"named tuple {name[:100]} has two fields of one name") from None
