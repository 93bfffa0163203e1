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
from collections.abc import Mapping
from dataclasses import replace
from typing import BinaryIO

from dsec.platform.child_pipes import bind, frame, own_pipes, read_body, write_frame
from dsec.platform.secrets import hidden, hidden_text, hidden_value
from dsec.platform.user_limits import UserLimits
from dsec.tool.call import Tool, load
from dsec.tool.frames import FRAME_BYTES_MAX, READY, Failure, Order, Outcome, reply
from dsec_contracts.canonical import decode, encode


def serve(orders: BinaryIO, replies: BinaryIO) -> None:
    """Make calls until the other side closes the pipe. The first frame is the tool."""
    first = read_body(orders)
    if first is None:
        return
    spec_hash, content, secrets = decode(first)
    write_frame(replies, frame(READY, FRAME_BYTES_MAX))
    tool: Tool | Outcome | None = None
    while (body := read_body(orders)) is not None:
        if tool is None:  # now, so that an import that hangs is under a call's deadline
            os.environ.update(secrets)
            tool = load(spec_hash, content, secrets)
        order = Order(*decode(body))
        outcome = tool.call(order) if isinstance(tool, Tool) else tool
        write_frame(replies, frame(reply(_hidden(outcome, secrets)), FRAME_BYTES_MAX))


def _hidden(outcome: Outcome, secrets: Mapping[str, str]) -> Outcome:
    """An outcome without the tool's secrets: what a client raises often names what it sent, and
    servers say what they were told."""
    if isinstance(outcome, Failure):
        return replace(outcome, message=hidden_text(outcome.message, secrets))
    if hidden(outcome, secrets) == outcome:
        return outcome
    return encode(hidden_value(decode(outcome), secrets))


def main() -> None:
    """Run until the service closes the pipe, or dies."""
    parser = argparse.ArgumentParser(prog="python -m dsec.tool.calling_process")
    parser.add_argument("--limits", type=UserLimits.from_argument, required=True)
    arguments = parser.parse_args()
    bind(arguments.limits)
    serve(*own_pipes())


if __name__ == "__main__":
    main()
