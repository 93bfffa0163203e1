"""What user code may not do to the process that it shares with other sessions.

A signal handler that one session sets interrupts another's step, and a signal to the process ends
them all. Whoever does it by mistake is told so by an exception in the session that does it. It is
no wall: code that means harm finds another way, and belongs on a worker of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from dsec.session.chance import Chance

Guards = dict[str, Callable[..., Any]]


def signal_guards() -> Guards:
    """For the functions of `signal`, by name; each is given the session's `Chance` first."""

    def refuse(_: Chance, *args: Any, **kwargs: Any) -> Any:
        raise PermissionError(
            "signals and their timers belong to the whole process, which other sessions share: "
            "a session's code may not set them"
        )

    names = ("signal", "setitimer", "alarm", "raise_signal", "set_wakeup_fd", "siginterrupt")
    return {name: refuse for name in (*names, "pthread_kill") if hasattr(signal, name)}


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
