"""Migrations, COPY and views on the servers that people bring: every version that is installed.

The rest of the suite runs on the one version that comes with DSec.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.migrations.test_database_roles import drop_roles, make_roles, url_of

from dsec.platform import migrations
from dsec.platform.bus import Message
from dsec.platform.log import LogReader, Position
from dsec.platform.stack import postgres
from dsec.platform.stack.database_roles import CLIENT, RECORDER
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess
from dsec.platform.stack.timescale import timescale_programs
from dsec.platform.storage import LogStorage, log_storage
from dsec.recorder.intake import read, table_of
from dsec.recorder.writer import Commit, Floor, Writer
from dsec_contracts import EVENTS, subjects

INSTALLED = Path("/usr/lib/postgresql")
EXAMPLES = Path(__file__).parents[2] / "contracts" / "examples"
NOW = datetime(2026, 3, 3, tzinfo=UTC)
SERVER_BY_PIP, VERSION_BY_PIP = "pgserver", "16"
"""A package with the binaries of a version that no distribution at hand has. Its own launcher is
not used: as root it changes the system."""


def _binaries() -> dict[str, Path]:
    """The programs of each version that is there, by version."""
    found = {path.parents[1].name: path.parent for path in INSTALLED.glob("*/bin/postgres")}
    if (package := importlib.util.find_spec(SERVER_BY_PIP)) is not None and package.origin:
        by_pip = Path(package.origin).parent / "pginstall" / "bin"
        found.setdefault(VERSION_BY_PIP, by_pip)
    return dict(sorted(found.items()))


BINARIES = _binaries()

pytestmark = pytest.mark.postgres


@pytest.fixture(params=list(BINARIES) or [None], ids=lambda version: f"postgresql-{version}")
async def server_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    """The URL of an empty database on a server of each version."""
    if request.param is None:
        pytest.skip(f"no PostgreSQL is installed in {INSTALLED}, and no package {SERVER_BY_PIP}")
    binaries = BINARIES[request.param]
    monkeypatch.setattr(postgres, "postgres_binary", lambda name: binaries / name)
    options = postgres.PostgresOptions(
        directory=tmp_path / "server",
        log_path=tmp_path / "postgres.log",
        port=free_port(),
        password="for-tests-only",
        fast_unsafe_for_tests=True,
    )
    child = ChildProcess(await postgres.prepare_postgres(options))
    await child.wait_ready()
    with psycopg.connect(options.url) as connection:
        assert str(connection.info.server_version // 10_000) == request.param
    try:
        yield options.url
    finally:
        await child.stop()


def examples() -> Any:
    """Every published example of an event that is logged, as a table of rows."""
    unused: Any = None
    durable = {event.event_name() for event in EVENTS if event.durable}
    paths = sorted(p for p in EXAMPLES.glob("*/*/*.json") if p.parts[-3] in durable)
    readings = []
    for sequence, path in enumerate(paths, 1):
        example = json.loads(path.read_text())
        body = json.dumps(example["body"]).encode()
        name = example["headers"]["ce-type"].rpartition(".v")[0]
        subject = subjects.subject(name, "x")
        message = Message(subject, example["headers"], body, sequence, 1, NOW, unused)
        readings.append(read(message, 1))
    return table_of(readings)


async def test_an_installed_server_takes_the_migrations_rows_and_views(server_url: str) -> None:
    await takes_everything(server_url)


@pytest.mark.timescaledb
async def test_a_hypertable_takes_the_migrations_rows_and_views(fresh_timescale_url: str) -> None:
    await takes_everything(fresh_timescale_url)


@pytest.mark.timescaledb
async def test_an_extension_that_is_installed_and_not_loaded_is_left_alone(
    timescale_root: Path, tmp_path: Path
) -> None:
    """Making it would end the connection. This is also the distribution's PostgreSQL (trixie's 17)
    as one without TimescaleDB has it."""
    programs = await timescale_programs(timescale_root, tmp_path / "probe.log", print)
    settings = {**programs.settings, "shared_preload_libraries": ""}
    directory = timescale_root / "unloaded"
    options = postgres.PostgresOptions(
        directory, tmp_path / "log", free_port(), "for-tests-only", fast_unsafe_for_tests=True
    )
    spec = await postgres.prepare_postgres(options, replace(programs, settings=settings))
    child = ChildProcess(spec)
    await child.wait_ready()
    try:
        await takes_everything(options.url)
        assert log_storage(options.url) == LogStorage(False, None, None, False)
    finally:
        await child.stop()
        shutil.rmtree(directory)


async def takes_everything(server_url: str) -> None:
    """Migrations, every example through COPY and through the stage, the reader and all views: the
    rows as the recorder that the embedded stack has, the rest as its client."""
    await asyncio.to_thread(migrations.migrate, server_url)
    await asyncio.to_thread(migrations.check_schema, server_url)
    await asyncio.to_thread(make_roles, server_url)
    try:
        await asyncio.to_thread(migrations.check_schema, server_url)
        await takes_rows(url_of(server_url, RECORDER), url_of(server_url, CLIENT))
    finally:
        await asyncio.to_thread(drop_roles, server_url)


async def takes_rows(recorder_url: str, client_url: str) -> None:
    table = examples()
    last = max(table["sequence"].to_pylist())
    writer = await Writer.connect(recorder_url)
    await writer.start_epoch(Floor(1, NOW, 0, None))
    assert await writer.ensure_partition(NOW, 12)
    await writer.append(Commit(1, table, (), last, NOW))
    await writer.append(Commit(1, table, (), last, NOW))  # through the stage: all are there
    await writer.close()
    reader = await LogReader.connect(client_url)
    await reader.wait_floor(last, 5, epoch=1)
    assert await reader.floor() == Position(1, last)
    sessions = set(map(bytes, table["session_id"].to_pylist()))
    with psycopg.connect(client_url) as connection:
        rows = connection.execute("select session_id, count(*) from event_log group by 1")
        counts = dict(rows.fetchall())
        assert {session_id.bytes for session_id in counts} == sessions
        for session_id, count in counts.items():
            assert len(await reader.rows(session_id, upto=last, epoch=1)) == count
        views = connection.execute("select viewname from pg_views where schemaname = 'public'")
        found = {
            name: len(
                connection.execute(
                    sql.SQL("select * from {}").format(sql.Identifier(name))
                ).fetchall()
            )
            for (name,) in views.fetchall()
        }
    await reader.spec("0" * 64)
    await reader.close()
    assert found["session_summary"] > 0
    assert found["step_trace"] > 0
