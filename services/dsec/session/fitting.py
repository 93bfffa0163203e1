"""Whether user code fits what its spec declares, as far as that can be seen without running it.

What cannot be seen is passed over: the session's start, or the call, finds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

_SETS_ANYTHING = frozenset(("setattr", "__dict__", "__setattr__"))
_FINDS_ANYTHING = ("__getattr__", "__getattribute__")


def lacks(cls: Any, name: str) -> bool:
    """Whether it is certain that no instance of a class has an attribute."""
    if not isinstance(cls, type):
        return False  # something that makes agents
    for one in cls.__mro__[:-1]:
        if name in vars(one) or any(finds in vars(one) for finds in _FINDS_ANYTHING):
            return False
        for value in vars(one).values():
            if isinstance(value, FunctionType):
                used = {*value.__code__.co_names, *value.__code__.co_consts}
                if name in used or used & _SETS_ANYTHING:
                    return False  # it may be given to an instance
    return True


def misfit(function: Any, parameters: Mapping[str, Any], given: str) -> str | None:
    """Why a function cannot take what its spec's schema of arguments says; None: it may.

    Args:
        given: the name of a parameter that every call has besides, where it is asked for.
    """
    try:
        takes = inspect.signature(function).parameters
    except Exception:  # noqa: BLE001 - no function, or one whose signature is user code
        return None
    told = parameters.get("properties")
    if not isinstance(told, Mapping):
        return None  # nothing is said of names
    for name, one in takes.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or name == given:
            continue
        if one.default is one.empty and name not in told:
            return f"it needs {name}, which the spec's parameters do not have"
        if one.kind is one.POSITIONAL_ONLY and one.default is one.empty:
            return f"it takes {name} by its place, and calls give arguments by name"
    if any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        return None
    required = parameters.get("required")
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in takes:
            return f"it does not take {name}, which the spec's parameters require"
    return None


def promise(value: Any) -> str | None:
    """What a returned value is that is no result yet; None: it is one, or none at all."""
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return "a generator, which yields pieces of one"
    if hasattr(type(value), "add_done_callback"):
        return "a future, which has its result later"
    return None
