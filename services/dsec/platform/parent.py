"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(sent: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent dies, however that dies. Linux only.

    The end of a pipe would not stop user code that never returns.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, sent)
