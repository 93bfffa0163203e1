"""The inner end of a disposable process that runs user code: its two pipes, and its bounds."""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

from dsec.platform.parent import die_with_parent
from dsec.platform.user_limits import UserLimits

LENGTH = struct.Struct("<I")
"""Stands before each body."""


def own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """What comes from the service and what goes to it, out of reach of `print` and `input` in user
    code."""
    received, sent = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return received, sent


def read_body(received: BinaryIO) -> bytes | None:
    """The next body; None once the service has closed the pipe."""
    start = received.read(LENGTH.size)
    return received.read(LENGTH.unpack(start)[0]) if len(start) == LENGTH.size else None


def write_frame(sent: BinaryIO, frame: bytes) -> None:
    """Send a body that has its length before it."""
    sent.write(frame)
    sent.flush()


def bind(limits: UserLimits) -> None:
    """End with the service, and have no more than this."""
    die_with_parent()
    limits.apply()
