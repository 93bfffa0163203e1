"""A calling process: where one tool runs (`python -m dsec.tool.calling_process`).

A tool may block for ever, also in compiled code that no signal handler interrupts, swallow its
cancellation, call `os._exit` or exhaust memory. So none runs in the service: this process makes one
call at a time, and the service kills it when the call's deadline has passed.

It is one tool's alone, since it holds that tool's secrets. It has no connection and is handed no
address of any server. That is protection against mistakes, not against malice.

It is two processes, of which the first keeps the second (`dsec.platform.keeper`): whatever a tool
starts is ended with it. A tool of Python code that leaves a thread or a process running when it
returns has used its process up: the next call gets another.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from dsec.platform.child_pipes import bind, frame, own_pipes, read_body, write_frame
from dsec.platform.copies import end_if_copy
from dsec.platform.keeper import keep
from dsec.platform.said import Said
from dsec.platform.secrets import hidden, hidden_text, hidden_value
from dsec.platform.user_limits import UserLimits, started_by
from dsec.tool.call import Tool, load
from dsec.tool.frames import FRAME_BYTES_MAX, READY, Failure, Order, Outcome, reply
from dsec_contracts.canonical import decode, encode


def serve(
    spec_hash: str,
    content: bytes,
    secrets: Mapping[str, str],
    orders: BinaryIO,
    replies: BinaryIO,
) -> None:
    """Make calls of a tool until the other side closes the pipe."""
    own_pid = os.getpid()
    write_frame(replies, frame(READY, FRAME_BYTES_MAX))
    tool: Tool | Outcome | None = None
    while (body := read_body(orders)) is not None:
        if tool is None:  # now, so that an import that hangs is under a call's deadline
            os.environ.update(secrets)
            tool = load(spec_hash, content, secrets, orders.fileno())
        order = Order(*decode(body))
        threads = _threads()
        outcome = tool.call(order) if isinstance(tool, Tool) else tool
        end_if_copy(own_pid)
        spent = isinstance(tool, Tool) and (
            tool.is_spent_by(outcome)
            or (tool.runs_user_code and (_threads() > threads or _started_others()))
        )
        answer = reply(_hidden(outcome, secrets), spent=spent)
        write_frame(replies, frame(answer, FRAME_BYTES_MAX))


def _threads() -> int:
    """Those that run Python code, however they were started."""
    return len(sys._current_frames())


def _started_others() -> bool:
    """Whether what the tool has started runs on: below the keeper there is more than we are."""
    return started_by(os.getppid(), 1) > 1


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
    limits: UserLimits = parser.parse_args().limits
    orders, replies = own_pipes()
    first = read_body(orders)
    if first is None:
        return
    spec_hash, content, secrets = decode(first)

    def work() -> None:
        bind(limits)
        serve(spec_hash, content, secrets, orders, replies)

    keep(work, (orders, replies), Said(secrets, partial(os.write, 2)).hear)


if __name__ == "__main__":
    main()
