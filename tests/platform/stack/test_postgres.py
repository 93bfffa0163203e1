"""The embedded PostgreSQL: durable by default, and it starts after whatever happened before."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from dsec.platform.stack import unprivileged
from dsec.platform.stack.errors import StackError
from dsec.platform.stack.identity import own_identity
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.postgres import PostgresOptions, prepare_postgres
from dsec.platform.stack.process import ChildProcess

pytestmark = pytest.mark.postgres


def options(folder: Path, password: str = "secret") -> PostgresOptions:
    return PostgresOptions(
        directory=folder / "server",
        log_path=folder / "postgres.log",
        port=free_port(),
        password=password,
        fast_unsafe_for_tests=True,
    )


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of the machine can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


async def start(server: PostgresOptions) -> ChildProcess:
    child = ChildProcess(await prepare_postgres(server))
    await child.wait_ready()
    return child


async def test_its_settings_are_the_durable_ones(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    expected = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "shared_buffers": "256MB",
        "max_wal_size": "4GB",
        "max_connections": "100",
        "jit": "off",
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "password_encryption": "scram-sha-256",
        "TimeZone": "UTC",
        "server_encoding": "UTF8",
    }
    assert {name: await connection.fetchval(f"show {name}") for name in expected} == expected
    await connection.close()


async def test_a_stranger_on_this_machine_is_not_let_in(database_url: str) -> None:
    without_password = database_url.replace(urlsplit(database_url).password or "", "wrong")
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(without_password)


def test_a_fresh_database_is_empty_and_another_one(
    database_url: str, fresh_database_url: str
) -> None:
    with psycopg.connect(fresh_database_url) as connection:
        connection.execute("create table only_here (x int)")
    with psycopg.connect(database_url) as connection:
        assert connection.execute("select to_regclass('only_here')").fetchone() == (None,)


async def test_kill_9_a_reused_pid_and_another_password(tmp_path: Path) -> None:
    server = options(tmp_path)
    child = await start(server)
    with psycopg.connect(server.url) as connection:
        connection.execute("create table kept as select 42 as x")
    child.send_signal(signal.SIGKILL)
    await child.wait_exit()

    # After a reboot another process may have the pid in the file: PostgreSQL would not start.
    other = await asyncio.create_subprocess_exec("sleep", "99")
    lock = server.data_dir / "postmaster.pid"
    lines = lock.read_text().splitlines()
    started_before = str(int(own_identity().create_time) - 86_400)
    lock.write_text("\n".join([str(other.pid), lines[1], started_before, *lines[3:]]) + "\n")
    child = await start(server)
    with psycopg.connect(server.url) as connection:
        assert connection.execute("select x from kept").fetchone() == (42,)
    await child.stop()
    assert child.returncode == 0
    assert other.returncode is None
    other.kill()
    await other.wait()

    wrong = PostgresOptions(server.directory, server.log_path, server.port, "lost")
    with pytest.raises(StackError, match="refuses the password"):
        await start(wrong)


async def test_a_disk_that_fills_while_the_database_is_made(
    small_disk: Callable[..., Path],
) -> None:
    server = options(small_disk(12))
    with pytest.raises(StackError, match=r"The disk that holds .* is full, so running initdb"):
        await prepare_postgres(server)
    assert os.listdir(server.directory) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another user")
async def test_without_namespaces_it_runs_as_nobody(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unprivileged, "NAMESPACE_TOOL", "no-such-program")
    server = options(open_folder)
    child = await start(server)
    assert server.data_dir.stat().st_uid == unprivileged.NOBODY_USER_ID
    await child.stop()
    assert child.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another user")
async def test_a_folder_that_nobody_may_enter_is_named(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unprivileged, "NAMESPACE_TOOL", "no-such-program")
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(StackError, match=rf"because {closed} is closed to others: open it"):
        await prepare_postgres(options(closed))


def test_the_stand_in_is_an_account_that_exists_and_not_root() -> None:
    assert unprivileged._stand_in({0, 33, 1000, 65534}) == 65534
    assert unprivileged._stand_in({0, 33, 1000}) == 33
