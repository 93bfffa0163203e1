"""Objects as canonical values: by their attributes, and by what `pickle` would keep of them.

Equal objects give equal bytes, in whatever process and under whatever module name their code was
loaded. What cannot be read wholly is refused.
"""

from __future__ import annotations

import random
import re
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from dsec_contracts.canonical import CanonicalError, encode

DEPTH_MAX = 32
"""Containers and objects within each other."""
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_Seen = dict[int, tuple[int, Any]]
"""Objects met, by id, numbered; each is kept, or another could come to lie where it was."""
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, mostly
_SHIPPED = re.compile(r"^dsec_code_[0-9a-f]{16}\.")


class StateError(ValueError):
    """An attribute whose state cannot be read. Names it."""


def slot_names(kind: type) -> list[tuple[str, str]]:
    """The slots of a class, each with the name under which `getattr` finds it."""
    result = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot in ("__dict__", "__weakref__"):
                continue
            private = slot.startswith("__") and not slot.endswith("__")
            result.append((slot, f"_{base.__name__.lstrip('_')}{slot}" if private else slot))
    return result


def canonical_bytes(value: Any, path: str) -> bytes:
    """All that `value` holds, as canonical bytes.

    Args:
        path: where it is, for the error.

    Raises:
        StateError: a part of it cannot be read.
    """
    try:
        return encode(_readable(value, path, {}, 0))
    except CanonicalError as error:
        raise StateError(f"{path}: {error}") from error


def _readable(value: Any, path: str, seen: _Seen, depth: int) -> Any:
    """`value` as canonical values, objects by their attributes, cycles by the order of meeting."""
    if isinstance(value, (*PLAIN, np.ndarray, np.generic)) and not (
        isinstance(value, np.ndarray) and value.dtype.kind == "O"
    ):
        return value
    if id(value) in seen:
        return ["seen", seen[id(value)][0]]
    seen[id(value)] = (len(seen), value)
    if depth >= DEPTH_MAX:
        raise StateError(f"{path}: nested deeper than {DEPTH_MAX}; define state_hash()")
    if isinstance(value, (list, tuple)):
        items = enumerate(value)
        return [_readable(item, f"{path}[{n}]", seen, depth + 1) for n, item in items]
    if isinstance(value, dict):
        return [
            [_readable(k, path, seen, depth + 1), _readable(v, f"{path}[{k!r}]", seen, depth + 1)]
            for k, v in value.items()
        ]
    if isinstance(value, np.ndarray):
        return _readable(value.tolist(), path, seen, depth)
    return _readable_object(value, path, seen, depth)


def _readable_object(value: Any, path: str, seen: _Seen, depth: int) -> Any:
    kind = type(value)
    # Shipped modules are named after their spec's hash, and that must not enter a state.
    name = f"{_SHIPPED.sub('', kind.__module__)}.{kind.__qualname__}"
    if isinstance(value, np.random.Generator):
        return [name, encode(value.bit_generator.state)]
    if isinstance(value, np.random.RandomState):
        return [name, encode(value.get_state(legacy=False))]
    if isinstance(value, random.Random):
        return [name, encode(value.getstate())]
    if isinstance(value, (set, frozenset)):
        return {encode(_readable(item, path, seen, depth + 1)) for item in value}
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType)):
        return ["named", getattr(value, "__qualname__", value.__name__)]
    if isinstance(value, MethodType):
        return ["method", value.__func__.__qualname__]
    if kind.__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return value
    attributes = dict(getattr(value, "__dict__", {}))
    for _, slot in slot_names(kind):
        if hasattr(value, slot):
            attributes[slot] = getattr(value, slot)
    parts: list[Any] = [name]
    if not attributes or _compiled(kind):
        parts.append(_reduced(value, name, path, seen, depth))
    if attributes:
        parts.append(_readable(dict(sorted(attributes.items())), path, seen, depth + 1))
    return parts


def _reduced(value: Any, name: str, path: str, seen: _Seen, depth: int) -> Any:
    """What a type written in C tells of its state to `copy` and `pickle`; Python cannot see it."""
    try:
        told = value.__reduce_ex__(2)
    except Exception as error:
        raise StateError(
            f"{path}: the state of {name} cannot be read; give the environment a state_hash()"
        ) from error
    if isinstance(told, str):
        return ["named", told]
    made, arguments, state, items, pairs = (*told, None, None, None)[:5]
    parts = [list(arguments), state, list(items or ()), [list(pair) for pair in pairs or ()]]
    if state is getattr(value, "__dict__", None):
        parts[1] = None  # it is read with the attributes
    return [getattr(made, "__qualname__", ""), _readable(parts, path, seen, depth + 1)]


def _compiled(kind: type) -> bool:
    """Whether a type has a part that is written in C and may keep state there."""
    return any(base is not object and not (base.__flags__ & _HEAP_TYPE) for base in kind.__mro__)
