"""Recorded values in JSON's types, whole: for files, where `plain` is for people and cuts.

NaN and infinities are the texts NaN, Infinity and -Infinity, bytes are hexadecimal, arrays lists.
A type is not kept; the log has it.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np


def json_value(value: Any) -> Any:
    """`value` in JSON's types."""
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, np.str_) else value
    if isinstance(value, np.generic):
        return json_value(value.item())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((json_value(item) for item in value), key=repr)
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        finite = value.dtype.kind in "biu" or (
            value.dtype.kind == "f" and bool(np.isfinite(value).all())
        )
        return value.tolist() if finite else json_value(value.tolist())
    return str(value)


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return float(value)
    return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")


def json_text(value: Any) -> str:
    """One line of JSON, in ASCII: texts hold signs at which some readers break lines, and lone
    surrogates, which are no UTF-8."""
    return json.dumps(json_value(value), separators=(",", ":"), allow_nan=False)
