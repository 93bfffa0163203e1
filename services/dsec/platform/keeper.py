"""A process that keeps another one, and ends with it all that it has started, wherever that is.

User code may start what leaves its process group: a daemon, a browser, a server in a session of its
own. To kill the group would not reach it, and once its parent has ended nothing says whose it was.
So user code runs in a child of a process that runs none. On Linux whatever loses its parent below
that one becomes its child; when the child is over, or the keeper is told to end (SIGTERM) or loses
its own parent, it kills all that is left and only then ends itself.

It also hears what the child and all that it has started say on their standard streams: nobody has
to trust them with a log.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import BinaryIO, NoReturn

from dsec.platform.parent import die_with_parent
from dsec.platform.user_limits import kill_group, processes_below

log = logging.getLogger(__name__)

END_S_MAX = 5.0
"""How long the keeper tries to end what is left."""
END_PERIOD_S = 0.002
SAID_BYTES = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36

Hears = Callable[[bytes], None]
"""Is given what was said, in pieces; an empty one once nothing more will be."""


def keep(work: Callable[[], None], pipes: Iterable[BinaryIO], hears: Hears) -> NoReturn:
    """Run `work` in a child, and end when it is over, with all that it has started.

    Args:
        pipes: the child's alone, so that who is at their other ends sees when it is gone.
    """
    wake, woken = os.pipe()
    said, saying = os.pipe()
    for end in (wake, woken, said):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    ends = [False]
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda got, _: ends.append(got == signal.SIGTERM))
    die_with_parent(signal.SIGTERM)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for end in (wake, woken, said):
            os.close(end)
        _be_kept(work, keeper, saying)
    for pipe in pipes:
        pipe.close()
    os.close(saying)
    while not any(ends) and not _is_over(child):
        select.select([wake, said], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(wake, SAID_BYTES)
        _hear(said, hears)
    _end_all(child)
    _hear(said, hears)
    hears(b"")
    os._exit(0)


def _be_kept(work: Callable[[], None], keeper: int, saying: int) -> NoReturn:
    status = 1
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() == keeper:
            os.dup2(saying, 1)
            os.dup2(saying, 2)
            os.close(saying)
            work()
            status = 0
    except BaseException:  # noqa: BLE001 - it must not go on as a second keeper
        traceback.print_exc()
    finally:
        os._exit(status)


def _hear(said: int, hears: Hears) -> None:
    with contextlib.suppress(BlockingIOError):
        if part := os.read(said, SAID_BYTES):
            hears(part)
        else:
            time.sleep(END_PERIOD_S)  # nobody has its other end: what ends is on its way


def _is_over(child: int) -> bool:
    """Whether the child is; others that have ended are cleared away. It stays to be waited for, so
    that its number is nobody else's."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == child:
                return True
            os.waitpid(ended.si_pid, 0)
    return False


def _end_all(child: int) -> None:
    kill_group(child)  # at once: none of them can start another
    until_s = time.monotonic() + END_S_MAX
    while time.monotonic() < until_s:
        for pid in processes_below(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(END_PERIOD_S)
    log.error("what user code has started cannot be ended: %s", processes_below(os.getpid()))
