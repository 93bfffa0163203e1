"""A calling process: where one tool runs (`python -m dsec.tool.calling_process`).

A tool may block for ever, also in compiled code that no signal handler interrupts, swallow its
cancellation, call `os._exit` or exhaust memory. So none runs in the service: this process makes one
call at a time, and the service kills it when the call's deadline has passed.

It is one tool's alone, since it holds that tool's secrets. It has no connection and is handed no
address of any server. That is protection against mistakes, not against malice.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from typing import BinaryIO

from dsec.platform.parent import die_with_parent
from dsec.tool.call import Tool, load
from dsec.tool.frames import LENGTH, READY, Order, Outcome, frame, reply
from dsec_contracts.canonical import decode


def serve(orders: BinaryIO, replies: BinaryIO) -> None:
    """Make calls until the other side closes the pipe. The first frame is the tool."""
    first = _read(orders)
    if first is None:
        return
    spec_hash, content, secrets = decode(first)
    _write(replies, READY)
    tool: Tool | Outcome | None = None
    while (body := _read(orders)) is not None:
        if tool is None:  # now, so that an import that hangs is under a call's deadline
            os.environ.update(secrets)
            tool = load(spec_hash, content, secrets)
        order = Order(*decode(body))
        _write(replies, reply(tool.call(order) if isinstance(tool, Tool) else tool))


def _read(orders: BinaryIO) -> bytes | None:
    start = orders.read(LENGTH.size)
    return orders.read(LENGTH.unpack(start)[0]) if len(start) == LENGTH.size else None


def _write(replies: BinaryIO, body: bytes) -> None:
    replies.write(frame(body))
    replies.flush()


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the service, out of reach of `print` and `input` in user code."""
    orders, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return orders, replies


def main() -> None:
    """Run until the service closes the pipe, or dies."""
    parser = argparse.ArgumentParser(prog="python -m dsec.tool.calling_process")
    parser.add_argument("--memory-bytes-max", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    if sys.platform == "linux":
        limit = arguments.memory_bytes_max
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    serve(*_own_pipes())


if __name__ == "__main__":
    main()
