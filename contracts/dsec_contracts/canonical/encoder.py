"""`encode`: from a value to its canonical bytes. On the hot path of every step.

Dispatch is one dictionary look-up by exact type; numpy's types enter that dictionary when they are
first met, so that numpy is never imported for their sake.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from dsec_contracts.canonical.form import (
    NAN,
    NESTING_DEPTH_MAX,
    TAG_OBJECT,
    CanonicalError,
    check_named,
    dtype_name,
    head,
)

Put = Callable[[bytes], None]

_FLOAT = struct.Struct(">Bd").pack
_HEADS = tuple(tuple(head(major, n) for n in range(256)) for major in range(6))
_UINTS = _HEADS[0]
_LITTLE = sys.byteorder == "little"


def encode(value: Any) -> bytes:
    """The canonical bytes of `value`.

    Raises:
        CanonicalError: the value holds something without a canonical form; names its path.
    """
    try:
        leaf = _LEAVES.get(type(value))
        if leaf is not None:
            return leaf(value)
        return _encoded(value, 0)
    except CanonicalError as error:
        path = _path_to_fault(value, "value", 0)
        raise CanonicalError(f"{path or 'value'}: {error}") from None


def _head(major: int, n: int) -> bytes:
    return _HEADS[major][n] if n < 256 else head(major, n)


def _int(value: int) -> bytes:
    if 0 <= value < 256:
        return _UINTS[value]
    major, n = (0, value) if value >= 0 else (1, -1 - value)
    if n < 0x1_0000_0000_0000_0000:
        return _head(major, n)
    body = n.to_bytes((n.bit_length() + 7) // 8, "big")
    return (b"\xc3" if major else b"\xc2") + _head(2, len(body)) + body


def _float(value: float) -> bytes:
    return NAN if value != value else _FLOAT(0xFB, value)


def _bytes(value: bytes) -> bytes:
    return _head(2, len(value)) + value


def _text(value: str) -> bytes:
    try:
        body = value.encode()
    except UnicodeEncodeError:
        raw = value.encode("utf-8", "surrogatepass")
        return TAG_OBJECT + b"\x82\x64wtf8" + _bytes(raw)
    return _head(3, len(body)) + body


def _bool(value: bool) -> bytes:
    return b"\xf5" if value else b"\xf4"


def _none(_: None) -> bytes:
    return b"\xf6"


@lru_cache(maxsize=1024)
def _array_prefix(dtype: Any, shape: tuple[int, ...]) -> tuple[bytes, bool]:
    """All that comes before an array's bytes, and whether these have to be swapped."""
    if dtype.itemsize == 0:
        raise CanonicalError("an array whose items have no width has no canonical form")
    name = dtype_name(dtype)
    dims = b"".join(map(_int, shape))
    size = _head(2, prod(shape) * dtype.itemsize)
    prefix = TAG_OBJECT + b"\x84\x62nd" + _text(name) + _head(4, len(shape)) + dims + size
    return prefix, not _is_little(dtype)


@lru_cache(maxsize=1024)
def _scalar_prefix(dtype: Any) -> tuple[bytes, bool]:
    prefix = TAG_OBJECT + b"\x83\x62np" + _text(dtype_name(dtype)) + _head(2, dtype.itemsize)
    return prefix, not _is_little(dtype)


def _is_little(dtype: Any) -> bool:
    return dtype.byteorder in ("<", "|") or (dtype.byteorder == "=" and _LITTLE)


def _ndarray(value: Any) -> bytes:
    prefix, swapped = _array_prefix(value.dtype, value.shape)
    # tobytes is C-ordered whatever the strides.
    body: bytes = value.byteswap().tobytes() if swapped else value.tobytes()
    return prefix + body


def _numpy_scalar(value: Any) -> bytes:
    dtype = value.dtype
    prefix, swapped = _scalar_prefix(dtype)
    if dtype.itemsize == 0:  # empty text; numpy would make an item of it
        return prefix
    body: bytes = value.byteswap().tobytes() if swapped else value.tobytes()
    return prefix + body


def _tensor(value: Any) -> bytes:
    try:
        array = value.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        # bfloat16, sparse, quantised, meta: numpy has no such array.
        reason = str(error).partition("\n")[0][:200]
        raise CanonicalError(f"a torch tensor has no canonical form: {reason}") from None
    return TAG_OBJECT + b"\x82\x65torch" + _ndarray(array)


_PLAIN: dict[type, Callable[[Any], bytes]] = {
    int: _int,
    float: _float,
    str: _text,
    bytes: _bytes,
    bool: _bool,
    type(None): _none,
}
_LEAVES = dict(_PLAIN)
"""Exact type to writer. Grows by numpy's own types, of which there are a few dozen."""


def _write(value: Any, put: Put, depth: int) -> None:
    kind = type(value)
    leaf = _LEAVES.get(kind) or _new_leaf(kind)
    if leaf is not None:
        put(leaf(value))
        return
    if depth >= NESTING_DEPTH_MAX:
        raise CanonicalError(f"is nested deeper than {NESTING_DEPTH_MAX} containers")
    if kind is dict:
        _write_map(value, put, depth)
    elif kind is list:
        put(_head(4, len(value)))
        _write_items(value, put, depth)
    elif kind is tuple:
        put(TAG_OBJECT + _head(4, len(value) + 1) + b"\x65tuple")
        _write_items(value, put, depth)
    else:
        _write_other(value, kind, put, depth)


def _write_items(items: Iterable[Any], put: Put, depth: int) -> None:
    leaves, depth = _LEAVES, depth + 1
    for item in items:
        leaf = leaves.get(type(item))
        if leaf is not None:
            put(leaf(item))
        else:
            _write(item, put, depth)


def _new_leaf(kind: type) -> Callable[[Any], bytes] | None:
    package = kind.__module__.partition(".")[0]
    module = sys.modules.get(package)
    if package == "numpy" and module is not None:
        # Other subclasses (masked arrays, matrices, records) mean more than their buffer says.
        if kind in (module.ndarray, module.memmap):
            return _LEAVES.setdefault(kind, _ndarray)
        if issubclass(kind, module.generic):
            return _LEAVES.setdefault(kind, _numpy_scalar)
    elif package == "torch" and module is not None and issubclass(kind, module.Tensor):
        return _LEAVES.setdefault(kind, _tensor)
    return None


def _write_other(value: Any, kind: type, put: Put, depth: int) -> None:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # Read once: a class of the user's own may yield others the next time.
        fields, values = tuple(value._fields), tuple(value)
        if len(fields) != len(values):
            raise CanonicalError(f"a {_type_name(kind)} has other fields than values")
        put(_named_prefix(kind.__name__, fields))
        _write_items(values, put, depth)
    elif isinstance(value, Mapping):
        _write_map(value, put, depth)
    elif isinstance(value, (set, frozenset)):
        items = sorted(_encoded(item, depth + 1) for item in value)
        if len(set(items)) != len(items):
            raise CanonicalError("has two members with the same canonical bytes")
        put(TAG_OBJECT + _head(4, len(items) + 1) + b"\x63set" + b"".join(items))
    elif isinstance(value, (bytearray, memoryview)):
        put(_bytes(bytes(value)))
    else:
        _write_subclass(value, kind, put, depth)


@lru_cache(maxsize=256)
def _named_prefix(name: str, fields: tuple[Any, ...]) -> bytes:
    check_named(name, fields)
    names = b"".join(map(_text, fields))
    count = _head(4, len(fields) + 3)
    return TAG_OBJECT + count + b"\x65named" + _text(name) + _head(4, len(fields)) + names


def _write_subclass(value: Any, kind: type, put: Put, depth: int) -> None:
    # A subclass of a plain type (an IntEnum, a str subclass) is its plain value. The base's own
    # methods are called: str(member) of an enumeration of str is its name, and differs by Python.
    if isinstance(value, str):
        put(_text(str.__str__(value)))
    elif isinstance(value, int):
        put(_int(int.__int__(value)))
    elif isinstance(value, float):
        put(_float(float.__float__(value)))
    elif isinstance(value, bytes):
        put(_bytes(bytes.__getitem__(value, slice(None))))
    elif isinstance(value, list):
        _write(list(value), put, depth)
    elif isinstance(value, tuple):
        _write(tuple(value), put, depth)
    else:
        raise CanonicalError(f"an object of type {_type_name(kind)} has no canonical form")


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _encoded(value: Any, depth: int) -> bytes:
    parts: list[bytes] = []
    _write(value, parts.append, depth)
    return b"".join(parts)


def _write_map(value: Mapping[Any, Any], put: Put, depth: int) -> None:
    # Read once: a class of the user's own may yield others the next time, or tell another length.
    pairs = value.items() if type(value) is dict else list(value.items())
    put(_head(5, len(pairs)))
    if not pairs:
        return
    depth += 1
    items = {_text(key) if type(key) is str else _encoded(key, depth): item for key, item in pairs}
    if len(items) != len(pairs):
        raise CanonicalError("has two keys with the same canonical bytes")
    for key in sorted(items):
        put(key)
        item = items[key]
        leaf = _LEAVES.get(type(item))
        if leaf is not None:
            put(leaf(item))
        else:
            _write(item, put, depth)


def _path_to_fault(value: Any, path: str, depth: int) -> str | None:
    """The path of the innermost part of `value` that cannot be encoded, or None."""
    if depth < NESTING_DEPTH_MAX:
        children: Iterable[tuple[str, Any]] = ()
        if isinstance(value, Mapping):
            children = ((f"{path}[{_label(key)}]", item) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            children = ((f"{path}[{n}]", item) for n, item in enumerate(value))
        for name, child in children:
            found = _path_to_fault(child, name, depth + 1)
            if found is not None:
                return found
    try:
        _encoded(value, depth)
    except CanonicalError:
        return path
    return None


def _label(key: Any) -> str:
    # A key's own repr may raise, or be as long as a book.
    if type(key) is str:
        return repr(key[:100])
    return repr(key) if type(key) is int and -(2**64) < key < 2**64 else f"<{type(key).__name__}>"
