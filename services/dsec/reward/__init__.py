"""Rewards: the service (`python -m dsec.reward`) and the decorator (`@dsec.reward(...)`).

Users write `@dsec.reward(weights={...})`, and the service's modules live under `dsec.reward`, so
the one name is both a package and a function. A module is callable only if its *class* is: Python
looks `__call__` up on the type, never in the module's own namespace. So this module's class is
swapped for a subclass that has it; imports of submodules work as ever.

Shipped reward code imports this inside a process that scores, so nothing of the service is loaded
here.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from dsec.reward.declaration import Transition, declare

__all__ = ["Transition"]


class _CallablePackage(ModuleType):
    """The package, which is also the decorator."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return declare(*arguments, **named)


sys.modules[__name__].__class__ = _CallablePackage
