"""Who starts processes: what user code starts can kill its worker, and nobody says who did.

No wall: whoever means harm finds a way past it. It is evidence. A SIGKILL that nobody here sent
comes from a machine's operator, or from what some session has started; of all the sessions of a
worker, those that started nothing are not to be suspected.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from dsec.env_runtime.running import RunningSlot

WAYS = (
    ("os", "fork"),
    ("os", "forkpty"),
    ("os", "posix_spawn"),
    ("os", "posix_spawnp"),
    ("os", "system"),
    ("subprocess", "_fork_exec"),
    ("_posixsubprocess", "fork_exec"),
)
"""The functions through which the standard library starts processes."""


def watch_starts(slot: RunningSlot) -> Callable[[], None]:
    """Note in `slot` who starts a process, from now on. Returns what undoes that."""
    before: list[tuple[Any, str, Any]] = []
    for module_name, name in WAYS:
        module = importlib.import_module(module_name)
        if (start := getattr(module, name, None)) is not None:
            before.append((module, name, start))
            setattr(module, name, _noting(slot, start))

    def undo() -> None:
        for module, name, start in before:
            setattr(module, name, start)

    return undo


def _noting(slot: RunningSlot, start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def noted(*args: Any, **kwargs: Any) -> Any:
        slot.note_start()
        return start(*args, **kwargs)

    return noted
