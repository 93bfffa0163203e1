"""Readers of arrays, array scalars and tensors. numpy and torch are imported when one is met."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

from dsec_contracts.canonical.encoder import encode
from dsec_contracts.canonical.form import CanonicalError, dtype_name, is_dtype_name
from dsec_contracts.canonical.primitives import Read, check_parts, expect, read_bytes, read_text

DIMENSIONS_MAX = 64
"""numpy's own limit."""

_ARRAY_START = b"\xd8\x1b\x84\x62nd"


def read_nd(data: bytes, at: int, n: int, depth: int = 0) -> Read:
    """`["nd", dtype, shape, bytes]`, behind its name."""
    check_parts("nd", n, 3, at)
    start = at
    name, at = read_text(data, at, "a dtype")
    dtype = _dtype(name)
    dimensions, at = expect(data, at, 4, "a shape")
    if dimensions > DIMENSIONS_MAX:
        raise CanonicalError(f"an array at byte {start} has more than {DIMENSIONS_MAX} dimensions")
    shape = []
    for _ in range(dimensions):
        length, at = expect(data, at, 0, "a length")
        shape.append(length)
    raw, at = read_bytes(data, at, "an array's bytes")
    if dtype.itemsize == 0 or prod(shape) * dtype.itemsize != len(raw):
        raise CanonicalError(f"an array at byte {start} has {len(raw)} bytes, not what it says")
    import numpy as np

    try:
        return np.ndarray(shape, dtype, raw).copy(), at
    except (ValueError, OverflowError) as error:
        raise CanonicalError(f"an array at byte {start}: {error}") from None


def read_np(data: bytes, at: int, n: int, depth: int) -> Read:
    """`["np", dtype, bytes]`, behind its name."""
    check_parts("np", n, 2, at)
    start = at
    name, at = read_text(data, at, "a dtype")
    dtype = _dtype(name)
    raw, at = read_bytes(data, at, "a scalar's bytes")
    import numpy as np

    try:
        # Taken out of an array, text loses the NULs at its end.
        if dtype.kind == "U":
            value: Any = np.str_(raw.decode("utf-32-le", "surrogatepass"))
        elif dtype.kind == "S":
            value = np.bytes_(raw)
        else:
            value = np.frombuffer(raw, dtype)[0]
        faithful = encode(value).endswith(data[start:at])
    except (ValueError, IndexError, OverflowError):
        faithful = False
    if not faithful:
        raise CanonicalError(f"a scalar of dtype {name} at byte {start} is malformed")
    return value, at


def read_torch(data: bytes, at: int, n: int, depth: int) -> Read:
    """`["torch", array]`, behind its name."""
    check_parts("torch", n, 1, at)
    if data[at : at + len(_ARRAY_START)] != _ARRAY_START:
        raise CanonicalError(f"byte {at} should begin a tensor's array")
    array, end = read_nd(data, at + len(_ARRAY_START), 3)
    try:
        import torch

        return torch.from_numpy(array), end
    except (TypeError, RuntimeError) as error:
        raise CanonicalError(f"a tensor at byte {at}: {error}") from None
    except ImportError:
        raise CanonicalError(f"a tensor at byte {at}: torch is not installed here") from None


@lru_cache(maxsize=256)
def _dtype(name: str) -> Any:
    """The numpy dtype of a canonical name."""
    try:
        import numpy as np

        if is_dtype_name(name):
            dtype = np.dtype(name)
            if dtype_name(dtype) == name:
                return dtype
    except (TypeError, ValueError, OverflowError):
        pass  # numpy knows no such type: refused below, like one that has another name
    except ImportError:
        raise CanonicalError("holds a numpy value, and numpy is not installed here") from None
    raise CanonicalError(f"dtype {name[:100]!r} is no form that DSec writes")
