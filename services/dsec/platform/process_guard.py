"""What user code may not do to the process that it shares with other sessions.

A signal handler that one session sets interrupts another's step, and a signal to the process ends
them all. Whoever does it by mistake is told so by an exception in the session that does it. It is
no wall: code that means harm finds another way, and belongs on a worker of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import types
from collections.abc import Callable
from typing import Any

from dsec.session.chance import Chance

Guards = dict[str, Callable[..., Any]]
LOOP_MODULES: tuple[types.ModuleType, ...] = (asyncio, asyncio.events, asyncio.tasks)
"""Where the functions that find the worker's event loop and its tasks are."""


def signal_guards() -> Guards:
    """For the functions of `signal`, by name; each is given the session's `Chance` first."""

    def refuse(_: Chance, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(
            "signals and their timers belong to the whole process, which other sessions share: "
            "a session's code may not set them"
        )

    names = ("signal", "setitimer", "alarm", "raise_signal", "set_wakeup_fd", "siginterrupt")
    return {name: refuse for name in (*names, "pthread_kill") if hasattr(signal, name)}


def loop_guards() -> Guards:
    """For the functions of `asyncio` that find the loop that runs, or its tasks: it is the
    worker's, and whoever stops it or cancels its tasks stops all sessions."""

    def refuse(_: Chance, *args: Any, **kwargs: Any) -> Any:
        # What asyncio itself says where none runs, so that libraries that ask go on without.
        raise RuntimeError("no running event loop: the worker's is not for a session's code")

    names = ("get_running_loop", "get_event_loop", "get_event_loop_policy")
    return dict.fromkeys((*names, "current_task", "all_tasks"), refuse)


def kill_guards() -> Guards:
    """For the functions of `os` that send signals: to others, not to this process."""
    kill, killpg = os.kill, os.killpg

    def guarded_kill(_: Chance, pid: int, number: int) -> None:
        if number and pid in (0, -1, os.getpid(), os.getppid(), -os.getpgrp()):
            raise PermissionError(f"os.kill({pid}, {number}): other sessions run in this process")
        kill(pid, number)

    def guarded_killpg(_: Chance, group: int, number: int) -> None:
        if number and group in (0, os.getpgrp()):
            raise PermissionError(f"os.killpg({group}, {number}): other sessions run in this group")
        killpg(group, number)

    return {"kill": guarded_kill, "killpg": guarded_killpg}
