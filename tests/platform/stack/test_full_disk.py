"""A disk that is full while a stack is up: everybody who waits for it is told so."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import uuid_utils
from click.testing import CliRunner, Result

from dsec.cli.main import main
from dsec.client.client import Client
from dsec.client.endpoints import ClientError
from dsec.platform.bus import Bus
from dsec.platform.nats_users import users
from dsec.platform.roles import OPERATOR
from dsec.platform.stack import stack_status
from dsec.platform.stack.state import StateDir

SLEEP = ("sleep", "600")
DISK_MB = 320
"""A stack does not start with less than 256 MB free."""
TOLD_WITHIN_S = 40


def fill(disk: Path) -> Path:
    """Leave no byte on a disk."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while free := os.statvfs(disk).f_bavail * 4096:
            try:
                file.write(bytes(min(free, 1 << 20)))
            except OSError as error:  # somebody else has taken the last block
                if error.errno != errno.ENOSPC:
                    raise
    return ballast


def dsec(state_dir: Path, *arguments: str) -> Result:
    """What a command says, without a stack trace."""
    urls = dict.fromkeys(("DSEC_NATS_URL", "DSEC_DATABASE_URL"), None)
    environment = {"DSEC_STATE_DIR": str(state_dir), **urls}
    result = CliRunner().invoke(main, list(arguments), env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def test_everybody_is_told_and_a_stop_stops(
    small_disk: Callable[..., Path],
    start_supervisor: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DSEC_NATS_URL", "DSEC_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    disk = small_disk(DISK_MB)
    supervisor = start_supervisor(disk, *SLEEP)

    async def stream() -> None:
        password = StateDir(disk).nats_passwords(users())[OPERATOR]
        host = supervisor.endpoints.nats_url.rpartition("@")[2]
        bus = await Bus.connect(f"nats://{OPERATOR}:{password}@{host}", "test")
        await bus.ensure_stream()
        await bus.close()

    asyncio.run(stream())
    ballast = fill(disk)
    told = json.loads(dsec(disk, "status", "--json").stdout)
    assert f"The disk that holds {disk} is full" in told["problem"]

    async def cancelled() -> None:
        async with Client(state_dir=disk) as client, asyncio.timeout(TOLD_WITHIN_S):
            with pytest.raises(ClientError, match=r"The disk that holds .* is full"):
                # More than one: what the server has at hand may have room in its last block.
                await client.cancel([UUID(str(uuid_utils.uuid7())) for _ in range(1000)])

    asyncio.run(cancelled())
    listed = dsec(disk, "sessions", "list")
    assert listed.exit_code == 1
    # Whether the database lets anybody in then is its own affair; what is said is one sentence.
    assert listed.stderr.startswith("Error: the ")
    assert len(listed.stderr.strip().splitlines()) == 1
    stopped = dsec(disk, "down")
    assert (stopped.exit_code, "is down" in stopped.stdout) == (0, True), stopped.output
    supervisor.process.wait(TOLD_WITHIN_S)
    again = dsec(disk, "up")
    assert again.exit_code == 1
    assert "nearly full" in again.stderr
    ballast.unlink()
    assert stack_status(disk).state == "stopped"
