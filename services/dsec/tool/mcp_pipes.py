"""An MCP server as a child of the calling process, spoken to over its standard input and output.

Not the client library's own transport: that takes lines of any length, and gives the server a
session of its own. Here a line is bounded, and the server is in the calling process's group, which
the end of a call's deadline kills at once.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import anyio
import mcp_types
from anyio.abc import Process
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage

from dsec.platform.user_environment import without_secrets

CLOSE_WAIT_S = 2.0
"""A server whose input is closed ends within this, or is killed."""
SAID_BYTES_MAX = 4096
"""Of what a server writes to its standard error, the end: that is where it says why it ends."""


@contextlib.asynccontextmanager
async def pipes_of(
    command: str,
    args: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    line_bytes_max: int,
    on_too_long: Callable[[], None],
    said: bytearray | None = None,
) -> AsyncIterator[TransportStreams]:
    """Start a server and exchange messages with it, one a line.

    A line of more than `line_bytes_max` ends the connection; `on_too_long` is called before.

    Args:
        said: gets the last `SAID_BYTES_MAX` bytes of its standard error; None: nobody reads that.

    Raises:
        OSError: it cannot be started.
    """
    process = await anyio.open_process(
        [command, *args],
        env={**without_secrets(os.environ), **env},
        cwd=folder,
        stderr=subprocess.DEVNULL if said is None else subprocess.PIPE,
    )
    heard_out = anyio.Event()
    received_in, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent, sent_out = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        rest = bytearray()
        async with received_in:
            assert process.stdout is not None
            async for part in process.stdout:
                first, *others = part.split(b"\n")
                rest += first
                for other in others:
                    if rest and len(rest) <= line_bytes_max:
                        await received_in.send(_message(bytes(rest)))
                    if len(rest) > line_bytes_max:
                        break
                    rest = bytearray(other)
                if len(rest) > line_bytes_max:
                    on_too_long()
                    return  # what waits for it is told that the server is gone

    async def pump(work: object) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await work()  # type: ignore[operator]

    async with anyio.create_task_group() as group:
        group.start_soon(pump, read)
        group.start_soon(_write, process, sent_out)
        group.start_soon(_hear, process, said, heard_out)
        try:
            yield received, sent
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
                with anyio.move_on_after(CLOSE_WAIT_S):  # what it started may hold the pipe
                    await heard_out.wait()
            group.cancel_scope.cancel()


async def _write(process: Process, sent: MemoryObjectReceiveStream[SessionMessage]) -> None:
    # Whichever end is closed first, the other's work is over: whoever waits for an answer is told
    # by the session.
    assert process.stdin is not None
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        async with sent:
            async for message in sent:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.stdin.send(text.encode() + b"\n")


async def _hear(process: Process, said: bytearray | None, heard_out: anyio.Event) -> None:
    """Keep the end of what a server writes to its standard error; say when there is no more."""
    try:
        if said is not None and process.stderr is not None:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                async for part in process.stderr:
                    said.extend(part)
                    del said[:-SAID_BYTES_MAX]
    finally:
        heard_out.set()  # also where this is cancelled: nobody waits for what nobody hears


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        found = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError as error:  # not UTF-8, no JSON, no message: the session goes on
        return error
    return SessionMessage(found)


async def _end(process: Process) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.aclose()
    with anyio.move_on_after(CLOSE_WAIT_S):
        await process.wait()
    if process.returncode is None:
        process.kill()
        with anyio.move_on_after(CLOSE_WAIT_S):
            await process.wait()
