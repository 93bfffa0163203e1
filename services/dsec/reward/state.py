"""What a function keeps between calls, where that can be seen: globals, defaults, closures.

A snapshot before some calls and one after say which of them changed. That names the culprit of a
reward that came out differently; a change alone is no fault, since it may be a cache that changes
no value.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final

from dsec_contracts.canonical import CanonicalError, encode

VALUE_BYTES_MAX: Final = 1 << 20
"""What is larger is left out: weights, tables."""
CHANGES_TOLD_MAX: Final = 5

Snapshot = Mapping[str, bytes]


def snapshot(function: Callable[..., Any], namespace: str) -> Snapshot:
    """What the function can see of its own past.

    Args:
        namespace: what the names of its shipped modules begin with.
    """
    found = {name: _bytes_of(value) for name, value in _places(function, namespace)}
    return {name: data for name, data in found.items() if data is not None}


def changed(before: Snapshot, after: Snapshot) -> list[str]:
    """The places that differ, for people."""
    names = [n for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)]
    return names[:CHANGES_TOLD_MAX]


def _places(function: Callable[..., Any], namespace: str) -> Iterator[tuple[str, Any]]:
    plain = inspect.unwrap(function)
    modules = {
        name.removeprefix(f"{namespace}."): vars(module)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.startswith(f"{namespace}.")
    }
    if isinstance(plain, FunctionType) and not any(
        plain.__globals__ is known for known in modules.values()
    ):
        modules[plain.__module__] = plain.__globals__
    for module, names in modules.items():
        for name, value in list(names.items()):
            if not name.startswith("__") and not isinstance(value, (ModuleType, type)):
                yield f"global {name} of {module}", value
    for name, value in list(vars(plain).items()) if hasattr(plain, "__dict__") else []:
        yield f"attribute {name} of {_name(plain)}", value
    if isinstance(plain, FunctionType):
        for n, value in enumerate(plain.__defaults__ or ()):
            yield f"default {n} of {_name(plain)}", value
        for name, value in (plain.__kwdefaults__ or {}).items():
            yield f"default {name} of {_name(plain)}", value
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                yield f"closed-over {name} of {_name(plain)}", cell.cell_contents


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _bytes_of(value: Any) -> bytes | None:
    try:
        if getattr(value, "nbytes", 0) > VALUE_BYTES_MAX or _length(value) > VALUE_BYTES_MAX:
            return None
        try:
            return encode(value)
        except CanonicalError:
            # Addresses in it stay: it is the same object before and after.
            state = vars(value) if hasattr(value, "__dict__") else None
            return repr((value, state)).encode("utf-8", "backslashreplace")[:VALUE_BYTES_MAX]
    except Exception:  # noqa: BLE001 - a value of the user's own making; others may tell
        return None


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (bytes, str, list, tuple, dict, set)) else 0
