"""The two pipes of a disposable process that runs user code, and its bounds.

What goes through them is a frame: a body with its length before it.
"""

from __future__ import annotations

import asyncio
import os
import struct
from typing import BinaryIO

from dsec.platform.parent import die_with_parent
from dsec.platform.user_limits import UserLimits

LENGTH = struct.Struct("<I")
"""Stands before each body."""


def frame(body: bytes, bytes_max: int) -> bytes:
    """`body` with its length before it.

    Raises:
        ValueError: it has more than `bytes_max`.
    """
    if len(body) > bytes_max:
        raise ValueError(f"a frame of {len(body)} bytes; the limit is {bytes_max}")
    return LENGTH.pack(len(body)) + body


async def received_body(replies: asyncio.StreamReader, bytes_max: int) -> bytes:
    """The next body that the process sent. User code may have written it.

    Raises:
        ValueError: it says that it has more than `bytes_max`.
        asyncio.IncompleteReadError: the process ended before it was whole.
    """
    size = LENGTH.unpack(await replies.readexactly(LENGTH.size))[0]
    if size > bytes_max:
        raise ValueError(f"a frame of {size} bytes; the limit is {bytes_max}")
    return await replies.readexactly(size)


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
