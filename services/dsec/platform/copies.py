"""Copies of this process that user code makes: a call that forks comes back twice.

The copy has our pipes and connections, and what it writes there would be taken for ours: the answer
to a question that somebody else asks next. Code that ends it by `sys.exit`, as is usual, ends
nothing where that is caught, as it is from user code.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def end_if_copy(own_pid: int) -> None:
    """After user code, whatever came of it: end this process at once if it is a copy.

    Args:
        own_pid: of the process that called the code.
    """
    if os.getpid() != own_pid:
        os._exit(0)


@contextlib.contextmanager
def ending_copies() -> Iterator[None]:
    """Around user code: copies of this process that it makes do not go on behind it."""
    own_pid = os.getpid()
    try:
        yield
    finally:
        end_if_copy(own_pid)
