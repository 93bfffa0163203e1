"""Recorded values as JSON can hold them: for people and tables, never to compare."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ITEMS_MAX = 10_000


def plain(value: Any) -> Any:
    """`value` in JSON's types. NaN and infinities become texts, bytes hexadecimal, arrays lists."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and not isinstance(value, np.generic):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, np.generic):
        return plain(value.item()) if value.dtype.kind in "biufSU" else repr(value)
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        small = value.size <= ITEMS_MAX and value.dtype.kind in "biufSU"
        return plain(value.tolist()) if small else f"array {value.dtype} {list(value.shape)}"
    return str(value)
