"""Verification as the client offers it: sessions are re-executed in a process of its own.

What user code does to that process costs its own session the verdict, and no other: a process that
dies, or that is at one session for too long, is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from dsec.client.client import Client
from dsec.client.endpoints import ClientError
from dsec.client.verdicts import unverified
from dsec.platform.object_s3 import credentials_of
from dsec.platform.user_environment import of_sessions

ANSWER_BYTES_MAX = 1 << 26
START_WAIT_S_MAX = 60.0
SESSION_DEADLINE_S = 600.0
"""What one session may take. A step of a worker has a deadline of its own; here the whole has."""


async def verify_sessions(
    client: Client,
    ids: Sequence[UUID],
    on_progress: Callable[[int], None] | None = None,
    *,
    deadline_s: float = SESSION_DEADLINE_S,
) -> list[dict[str, Any]]:
    """Re-execute sessions under their recorded inputs, and score them anew. Runs their code.

    Args:
        deadline_s: for each session; one that takes longer cannot be verified.

    Returns:
        For each: `session_id, ok, steps, reward_ok, complete, first_divergence, ended, error`.
        `error` says why a session could not be verified, among others that its code ended the
        process.

    Raises:
        ClientError: no process could be started.
    """
    found: list[dict[str, Any]] = []
    process: _Process | None = None
    refused = await client.queries.rejections(ids)
    try:
        for session_id in ids:
            if session_id in refused:
                code, _ = refused[session_id]
                found.append(unverified(session_id, f"it was rejected ({code}), so nothing ran"))
                continue
            if process is None:
                process = await _Process.start(client)
            try:
                async with asyncio.timeout(deadline_s):
                    found.append(await process.verify(session_id))
            except (TimeoutError, _Died) as error:
                told = str(error) or f"it took longer than {deadline_s:g} s and was stopped"
                found.append(unverified(session_id, told))
                await process.end()
                process = None
            if on_progress is not None:
                on_progress(len(found))
        return found
    finally:
        if process is not None:
            await process.end()


class _Died(Exception):
    """The process ended before it answered."""


class _Process:
    """One `dsec.client.verifier`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, client: Client) -> _Process:
        """Start one, and tell it where the log is."""
        made = cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dsec.client.verifier",
                env=of_sessions(os.environ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=ANSWER_BYTES_MAX,
            )
        )
        # Not in its environment, where the session's code could read them.
        where = {
            "database_url": client.database_url,
            "object_store_url": client.object_store_url,
            "object_store_credentials": credentials_of(os.environ),
        }
        made._write(json.dumps(where))
        try:
            async with asyncio.timeout(START_WAIT_S_MAX):
                ready = await made._read()
        except TimeoutError:
            ready = b""
        if not ready:
            await made.end()
            raise ClientError(
                "the process that re-executes sessions did not start: what it wrote above says why"
            )
        return made

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def _read(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def verify(self, session_id: UUID) -> dict[str, Any]:
        """The verdict on one session.

        Raises:
            _Died: the session's code ended the process.
        """
        self._write(str(session_id))
        line = await self._read()
        if not line:
            code = await self._process.wait()
            raise _Died(
                f"the process that re-executed it ended (exit code {code}), most likely by the "
                "session's own code"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        """End it, and whatever user code started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
