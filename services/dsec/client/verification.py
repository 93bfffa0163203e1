"""Verification as the client offers it: sessions are re-executed in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from dsec.client.client import Client
from dsec.client.endpoints import ClientError
from dsec.env_runtime.supervisor import WORKER_ENVIRONMENT

ANSWER_BYTES_MAX = 1 << 26


async def verify_sessions(
    client: Client, ids: Sequence[UUID], on_progress: Callable[[int], None] | None = None
) -> list[dict[str, Any]]:
    """Re-execute sessions under their recorded inputs, and score them anew. Runs their code.

    Returns:
        For each: `session_id, ok, steps, reward_ok, complete, first_divergence, error`.

    Raises:
        ClientError: the process died; names the session whose code was running.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dsec.client.verifier",
        env={
            **os.environ,
            **WORKER_ENVIRONMENT,
            "DSEC_DATABASE_URL": client.database_url,
            "DSEC_NATS_URL": client.nats_url,
            "DSEC_OBJECT_STORE_URL": client.object_store_url,
        },
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=ANSWER_BYTES_MAX,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    found: list[dict[str, Any]] = []
    try:
        for session_id in ids:
            process.stdin.write(f"{session_id}\n".encode())
            line = await process.stdout.readline()
            if not line:
                code = await process.wait()
                raise ClientError(
                    f"the process that re-executed session {session_id} died (exit code {code}): "
                    "the session's own code ended it"
                )
            found.append(json.loads(line))
            if on_progress is not None:
                on_progress(len(found))
        process.stdin.close()
        await process.wait()
        return found
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
