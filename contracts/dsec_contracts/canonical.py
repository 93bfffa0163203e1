"""The canonical encoding: one value, one sequence of bytes, on every machine.

Facts are hashed and compared as bytes, so the bytes must depend on the value alone. JSON cannot do
that (no NaN, no infinities, no bytes, no dtypes, `-0.0` and `1e16` survive only by luck), so facts
are CBOR (RFC 8949) in its deterministic form, with these choices:

* integers take the shortest form; beyond 64 bits they are bignums (tags 2 and 3);
* floats always take 64 bits, and every NaN is `7ff8000000000000`;
* map keys are sorted by their encoded bytes; a repeated key is refused;
* text is UTF-8; text with lone surrogates is `["wtf8", bytes]` under tag 27;
* everything CBOR has no word for is an array under tag 27 (IANA: "serialised object with type
  name"): `["tuple", ...]`, `["nd", dtype, shape, bytes]`, `["np", dtype, bytes]`,
  `["named", name, fields, ...]`, `["set", ...]`, `["torch", array]`. Array bytes are C-ordered and
  little-endian, whatever the strides and the byte order of the array they came from.

Published test vectors lie in `contracts/examples/canonical_vectors.json`. numpy and torch are
never imported unless a value of theirs is decoded.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

NESTING_DEPTH_MAX = 64
"""Containers inside containers; a deeper (or self-referring) value is refused."""

_FLOAT = struct.Struct(">Bd").pack
_NAN = b"\xfb\x7f\xf8\x00\x00\x00\x00\x00\x00"
_TAG_OBJECT = b"\xd8\x1b"
_NUMPY_KINDS = frozenset("biufcSUMm")


class CanonicalError(ValueError):
    """A value has no canonical bytes, or bytes are not canonical. Says where in the value."""


def encode(value: Any) -> bytes:
    """The canonical bytes of `value`.

    Raises:
        CanonicalError: the value holds something without a canonical form; names its path.
    """
    parts: list[bytes] = []
    try:
        _write(value, parts.append, 0)
    except CanonicalError as error:
        path = _path_to_fault(value, "value", 0)
        raise CanonicalError(f"{path or 'value'}: {error}") from None
    return b"".join(parts)


def head(major: int, n: int) -> bytes:
    """The first bytes of a CBOR item: major type 0 to 7 and its argument in the shortest form."""
    base = major << 5
    if n < 24:
        return bytes((base | n,))
    if n < 0x100:
        return bytes((base | 24, n))
    if n < 0x10000:
        return struct.pack(">BH", base | 25, n)
    if n < 0x1_0000_0000:
        return struct.pack(">BI", base | 26, n)
    return struct.pack(">BQ", base | 27, n)


_HEADS = {(major, n): head(major, n) for major in range(6) for n in range(256)}


def _head(major: int, n: int) -> bytes:
    return _HEADS.get((major, n)) or head(major, n)


def _int(value: int) -> bytes:
    if value >= 0:
        if value < 0x1_0000_0000_0000_0000:
            return _head(0, value)
        body = value.to_bytes((value.bit_length() + 7) // 8, "big")
        return b"\xc2" + _head(2, len(body)) + body
    rest = -1 - value
    if rest < 0x1_0000_0000_0000_0000:
        return _head(1, rest)
    body = rest.to_bytes((rest.bit_length() + 7) // 8, "big")
    return b"\xc3" + _head(2, len(body)) + body


def _float(value: float) -> bytes:
    return _NAN if value != value else _FLOAT(0xFB, value)


def _bytes(value: bytes) -> bytes:
    return _head(2, len(value)) + value


def _text(value: str) -> bytes:
    try:
        body = value.encode("utf-8")
    except UnicodeEncodeError:
        raw = value.encode("utf-8", "surrogatepass")
        return _TAG_OBJECT + b"\x82\x64wtf8" + _bytes(raw)
    return _head(3, len(body)) + body


def _bool(value: bool) -> bytes:
    return b"\xf5" if value else b"\xf4"


def _none(_: None) -> bytes:
    return b"\xf6"


@lru_cache(maxsize=1024)
def _dtype_name(dtype: Any) -> str:
    if dtype.kind not in _NUMPY_KINDS or dtype.fields is not None:
        raise CanonicalError(f"a numpy dtype {dtype} has no canonical form")
    return str(dtype.newbyteorder("<").str)


@lru_cache(maxsize=1024)
def _array_prefix(dtype: Any, shape: tuple[int, ...]) -> bytes:
    dims = b"".join(_int(n) for n in shape)
    return _TAG_OBJECT + b"\x84\x62nd" + _text(_dtype_name(dtype)) + _head(4, len(shape)) + dims


def _little_endian(array: Any) -> Any:
    order = array.dtype.byteorder
    if order == ">" or (order == "=" and struct.pack("=H", 1) != b"\x01\x00"):
        return array.astype(array.dtype.newbyteorder("<"))
    return array


def _ndarray(value: Any) -> bytes:
    body = _little_endian(value).tobytes()  # tobytes is C-ordered whatever the strides
    return _array_prefix(value.dtype, value.shape) + _bytes(body)


def _numpy_scalar(value: Any) -> bytes:
    name = _dtype_name(value.dtype)
    body = _little_endian(value).tobytes()
    return _TAG_OBJECT + b"\x83\x62np" + _text(name) + _bytes(body)


_SCALARS: dict[type, Callable[[Any], bytes]] = {
    int: _int,
    float: _float,
    str: _text,
    bytes: _bytes,
    bool: _bool,
    type(None): _none,
}


def _write(value: Any, put: Callable[[bytes], None], depth: int) -> None:
    kind = type(value)
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        put(scalar(value))
        return
    if depth >= NESTING_DEPTH_MAX:
        raise CanonicalError(f"is nested deeper than {NESTING_DEPTH_MAX} containers")
    if kind is dict:
        _write_map(value, put, depth)
    elif kind is list:
        put(_head(4, len(value)))
        for item in value:
            _write(item, put, depth + 1)
    elif kind is tuple:
        put(_TAG_OBJECT + _head(4, len(value) + 1) + b"\x65tuple")
        for item in value:
            _write(item, put, depth + 1)
    else:
        _write_other(value, kind, put, depth)


def _write_other(value: Any, kind: type, put: Callable[[bytes], None], depth: int) -> None:
    module = kind.__module__
    if module == "numpy" or module.startswith("numpy."):
        if kind.__name__ in ("ndarray", "memmap"):
            put(_ndarray(value))
            return
        if hasattr(value, "dtype") and getattr(value, "shape", None) == ():
            put(_numpy_scalar(value))
            return
    elif module.partition(".")[0] == "torch" and hasattr(value, "detach"):
        put(_TAG_OBJECT + b"\x82\x65torch")
        put(_ndarray(value.detach().cpu().numpy()))
        return
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = list(value._fields)
        put(_TAG_OBJECT + _head(4, len(fields) + 3) + b"\x65named" + _text(kind.__name__))
        _write(fields, put, depth + 1)
        for item in value:
            _write(item, put, depth + 1)
    elif isinstance(value, Mapping):
        _write_map(value, put, depth)
    elif isinstance(value, (set, frozenset)):
        items = sorted(_encoded(item, depth + 1) for item in value)
        put(_TAG_OBJECT + _head(4, len(items) + 1) + b"\x63set" + b"".join(items))
    elif isinstance(value, (bytearray, memoryview)):
        put(_bytes(bytes(value)))
    else:
        _write_subclass(value, kind, put, depth)


def _write_subclass(value: Any, kind: type, put: Callable[[bytes], None], depth: int) -> None:
    # A subclass of a plain type (an IntEnum, a str subclass, an OrderedDict) is its plain value.
    for base, scalar in _SCALARS.items():
        if isinstance(value, base):
            put(scalar(base(value)))
            return
    for sequence in (list, tuple):
        if isinstance(value, sequence):
            _write(sequence(value), put, depth)
            return
    raise CanonicalError(f"an object of type {module_name(kind)} has no canonical form")


def module_name(kind: type) -> str:
    """`module.Class`, as errors name a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _encoded(value: Any, depth: int) -> bytes:
    parts: list[bytes] = []
    _write(value, parts.append, depth)
    return b"".join(parts)


def _write_map(value: Mapping[Any, Any], put: Callable[[bytes], None], depth: int) -> None:
    put(_head(5, len(value)))
    if not value:
        return
    items = {_encoded(key, depth + 1): item for key, item in value.items()}
    if len(items) != len(value):
        raise CanonicalError("has two keys with the same canonical bytes")
    for key in sorted(items):
        put(key)
        _write(items[key], put, depth + 1)


def _path_to_fault(value: Any, path: str, depth: int) -> str | None:
    """The path of the innermost part of `value` that cannot be encoded, or None."""
    if depth < NESTING_DEPTH_MAX:
        children: list[tuple[str, Any]] = []
        if isinstance(value, Mapping):
            children = [(f"{path}[{key!r}]", item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            children = [(f"{path}[{n}]", item) for n, item in enumerate(value)]
        for name, child in children:
            found = _path_to_fault(child, name, depth + 1)
            if found is not None:
                return found
    try:
        _encoded(value, depth)
    except CanonicalError:
        return path
    return None


def decode(data: bytes) -> Any:
    """The value that `data` is the canonical encoding of. Arrays come back writable.

    Raises:
        CanonicalError: the bytes are cut short, too deep, have more behind them, or use a form
            that `encode` never writes.
    """
    try:
        value, end = _read(data, 0, 0)
    except (IndexError, struct.error):
        raise CanonicalError("the bytes end in the middle of a value") from None
    if end != len(data):
        raise CanonicalError(f"{len(data) - end} bytes follow the value")
    return value


def _argument(data: bytes, at: int, low: int) -> tuple[int, int]:
    if low < 24:
        return low, at
    if low > 27:
        raise CanonicalError(f"indefinite or reserved length at byte {at - 1}")
    size = 1 << (low - 24)
    if at + size > len(data):
        raise IndexError
    n = int.from_bytes(data[at : at + size], "big")
    if n < (24 if size == 1 else 1 << (4 * size)):
        raise CanonicalError(f"a number at byte {at - 1} is not in its shortest form")
    return n, at + size


def _take(data: bytes, at: int, n: int) -> tuple[bytes, int]:
    if at + n > len(data):
        raise IndexError
    return data[at : at + n], at + n


def _read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    first = data[at]
    at += 1
    major, low = first >> 5, first & 31
    if major == 7:
        return _read_simple(data, at, first)
    n, at = _argument(data, at, low)
    if major == 0:
        return n, at
    if major == 1:
        return -1 - n, at
    if major == 2:
        return _take(data, at, n)
    if major == 3:
        raw, at = _take(data, at, n)
        try:
            return raw.decode("utf-8"), at
        except UnicodeDecodeError as error:
            raise CanonicalError(f"text at byte {at - n} is not UTF-8: {error.reason}") from None
    if depth >= NESTING_DEPTH_MAX:
        raise CanonicalError(f"is nested deeper than {NESTING_DEPTH_MAX} containers")
    if major == 4:
        return _read_list(data, at, n, depth)
    if major == 5:
        return _read_map(data, at, n, depth)
    return _read_tag(data, at, n, depth)


def _read_simple(data: bytes, at: int, first: int) -> tuple[Any, int]:
    if first == 0xFB:
        raw, at = _take(data, at, 8)
        value = struct.unpack(">d", raw)[0]
        if value != value and raw != _NAN[1:]:
            raise CanonicalError(f"a NaN at byte {at - 9} is not the canonical one")
        return value, at
    simple = {0xF4: False, 0xF5: True, 0xF6: None}
    if first not in simple:
        raise CanonicalError(f"byte {first:#04x} at {at - 1} is no form that DSec writes")
    return simple[first], at


def _read_list(data: bytes, at: int, n: int, depth: int) -> tuple[list[Any], int]:
    if n > len(data) - at:
        raise IndexError
    items = []
    for _ in range(n):
        item, at = _read(data, at, depth + 1)
        items.append(item)
    return items, at


def _read_map(data: bytes, at: int, n: int, depth: int) -> tuple[dict[Any, Any], int]:
    if 2 * n > len(data) - at:
        raise IndexError
    result: dict[Any, Any] = {}
    previous = b""
    for _ in range(n):
        start = at
        key, at = _read(data, at, depth + 1)
        encoded = data[start:at]
        if encoded <= previous:
            raise CanonicalError(f"map keys at byte {start} are not in order")
        previous = encoded
        item, at = _read(data, at, depth + 1)
        try:
            result[key] = item
        except TypeError:
            raise CanonicalError(f"a map key at byte {start} is not hashable") from None
    return result, at


def _read_tag(data: bytes, at: int, tag: int, depth: int) -> tuple[Any, int]:
    body, end = _read(data, at, depth + 1)
    if tag in (2, 3) and isinstance(body, bytes):
        n = int.from_bytes(body, "big")
        if n < 0x1_0000_0000_0000_0000 or body[:1] == b"\x00":
            raise CanonicalError(f"a bignum at byte {at} is not in its shortest form")
        return (n if tag == 2 else -1 - n), end
    if tag != 27 or not isinstance(body, list) or not body:
        raise CanonicalError(f"tag {tag} at byte {at} is no form that DSec writes")
    try:
        return _object(body[0], body[1:]), end
    except CanonicalError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        raise CanonicalError(f"object {body[0]!r} at byte {at} is malformed: {error}") from None


def _object(name: Any, rest: list[Any]) -> Any:
    if name == "tuple":
        return tuple(rest)
    if name == "wtf8":
        return bytes(rest[0]).decode("utf-8", "surrogatepass")
    if name == "set":
        return set(rest)
    if name == "named":
        return _named(rest[0], tuple(rest[1]))(*rest[2:])
    if name == "nd":
        return _to_array(rest[0], rest[2]).reshape(rest[1])
    if name == "np":
        return _to_array(rest[0], rest[1])[0]
    if name == "torch":
        import torch

        return torch.from_numpy(rest[0])
    raise CanonicalError(f"object type {name!r} is not known")


def _to_array(dtype_name: str, raw: bytes) -> Any:
    import numpy as np

    dtype = np.dtype(dtype_name)
    if dtype.kind not in _NUMPY_KINDS or _dtype_name(dtype) != dtype_name:
        raise CanonicalError(f"dtype {dtype_name!r} is no form that DSec writes")
    if dtype.itemsize == 0:
        return np.empty(1, dtype)
    return np.frombuffer(raw, dtype).copy()


@lru_cache(maxsize=256)
def _named(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)  # noqa: PYI024
