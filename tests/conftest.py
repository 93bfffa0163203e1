"""Real servers for tests: one nats-server, one PostgreSQL and one TimescaleDB a run, started only
when asked for.

All listen on free ports of loopback, keep their files in pytest's temporary folder, and die with
the test run even if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql
from tests import seaweedfs

from dsec.platform.migrations import migrate
from dsec.platform.stack.errors import StackError
from dsec.platform.stack.nats_server import NatsServerOptions, nats_server_process
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.postgres import PostgresOptions, prepare_postgres
from dsec.platform.stack.process import ChildProcess, ProcessSpec
from dsec.platform.stack.timescale import timescale_programs

# How long an example takes says how busy the machine is; a test that promises a time measures it.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
T = TypeVar("T")
PASSWORD = "for-tests-only"
DEAR = {
    "timescaledb": "timescaledb",
    "timescale_root": "timescaledb",
    "stack": "stack",
    "timescale_community": "timescale_community",
}
"""Marks and fixtures, and the group of the tests that have them: they share what is dear. The first
one counts: TimescaleDB takes longer to fetch than a stack to start."""
LONGEST = (
    "stack",
    "timescaledb",
    "recorder/test_recorder",
    "simulation/test_simulation",
    "env_runtime/test_anchors",
    "tool/test_mcp",
    "tool/test_mcp_tasks",
    "tool/test_hostile_python",
    "tool/test_service",
    "timescale_community",
    "reward/test_asking",
    "env_runtime/test_worker",
    "platform/test_nats_cluster",
    "env_runtime/test_tools",
    "scheduler/test_service",
    "scheduler/test_returns",
    "reward/test_replicas",
    "tool/test_processes",
    "tool/test_limits",
    "simulation/test_jobs",
    "client/test_verification",
    "platform/test_objects",
    "reward/test_service",
)
"""Groups that take a quarter of a minute and more. They begin first and in this order:
what begins last should be short, so that no process works alone in the end."""
_left_out: set[str] = set()
# Of stacks that tests start: who means that sessions share a worker need not say so, and a worker
# less is a process less to start.
os.environ.setdefault("DSEC_WORKERS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests are spread over processes, one has all that start whole stacks: two at once only
    slow each other down. One has all that share what is dear, and otherwise a whole file; and what
    takes longest begins first. Those that share a stack follow each other, for it to end after
    them.

    First of its name: pytest-xdist reads the groups in a hook of this name.
    """
    begins = {group: place for place, group in enumerate(LONGEST)}
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: (begins.get(groups[item], len(begins)), _stack_of(item) is None))


def _group(item: pytest.Item) -> str:
    names = {mark.name for mark in item.iter_markers()}
    names.update(getattr(item, "fixturenames", ()))
    dear = next((group for name, group in DEAR.items() if name in names), None)
    return dear or item.nodeid.partition(".py::")[0].removeprefix("tests/")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A stack ends after the last test that needs it: one that idles until the whole run is over
    takes a tenth of a core from all others."""
    yield
    stack = _stack_of(item)
    if stack is None or (nextitem is not None and _stack_of(nextitem) is stack):
        return
    assert isinstance(item, pytest.Function)
    stack.finish(item._request)


def _stack_of(item: pytest.Item) -> Any:
    """The fixture of the stack that a test shares with others, of which there are several."""
    if not isinstance(item, pytest.Function):
        return None
    found = item._fixtureinfo.name2fixturedefs.get("stack")
    return found[-1] if found and found[-1].scope == "session" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Tests that are spread without their groups pass all the same, and start every server and
    every stack once a process: twice the time, and nothing says why."""
    if node.config.getoption("dist") == "loadgroup" and not all("@" in each for each in ids):
        pytest.exit(
            "this pytest-xdist loses the groups of tests under this pytest: install those that "
            "pyproject.toml names (pip install -e '.[dev]')",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Keep what is left out, for the last lines: without the group that pytest-xdist appends."""
    for item in items:
        if item.get_closest_marker("long"):
            group = item.get_closest_marker("xdist_group")
            _left_out.add(item.nodeid.removesuffix(f"@{group.args[0]}" if group else ""))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process among several has no last lines: whoever started it has."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = sorted(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of several processes is done."""
    _left_out.update(getattr(node, "workeroutput", {}).get("left_out", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Nothing is left out silently."""
    for node in sorted(_left_out):
        terminalreporter.write_line(f"NOT RUN {node}: it is long; `just test-all` runs it")


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a nats-server with JetStream, shared by the whole run: name streams uniquely."""
    folder = tmp_path_factory.mktemp("nats")
    options = NatsServerOptions(
        directory=folder, log_path=folder / "nats.log", port=free_port(), password=PASSWORD
    )
    with _running(nats_server_process(options)):
        yield options.url


@pytest.fixture(scope="session")
def database_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty database of a PostgreSQL, shared by the whole run."""
    folder = tmp_path_factory.mktemp("postgres")
    options = PostgresOptions(
        directory=folder / "server",
        log_path=folder / "postgres.log",
        port=free_port(),
        password=PASSWORD,
        fast_unsafe_for_tests=True,
    )
    with _running(_run(prepare_postgres(options))):
        yield options.url


@pytest.fixture(scope="session")
def timescale_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private root with PostgreSQL and TimescaleDB, fetched once a run."""
    folder = tmp_path_factory.mktemp("timescaledb")
    try:
        _run(timescale_programs(folder / "root", folder / "apt.log", print))
    except StackError as error:
        pytest.skip(str(error))
    return folder / "root"


@pytest.fixture(scope="session")
def timescale_url(timescale_root: Path) -> Iterator[str]:
    """The URL of an empty database of a PostgreSQL with TimescaleDB, shared by the whole run."""
    folder = timescale_root.parent
    options = PostgresOptions(
        directory=timescale_root,
        log_path=folder / "postgres.log",
        port=free_port(),
        password=PASSWORD,
        fast_unsafe_for_tests=True,
    )
    programs = _run(timescale_programs(timescale_root, folder / "apt.log", print))
    with _running(_run(prepare_postgres(options, programs))):
        yield options.url


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweedfs.Server]:
    """An S3 server, shared by the whole run; its credentials are in the environment meanwhile."""
    server, spec = seaweedfs.seaweedfs(tmp_path_factory.mktemp("seaweedfs"))
    with seaweedfs.in_environment(seaweedfs.CREDENTIALS), _running(spec):
        yield server


@pytest.fixture
def s3_url(s3_server: seaweedfs.Server) -> str:
    """The URL of an empty object store on it."""
    return replace(s3_server, prefix=uuid.uuid4().hex).url


@pytest.fixture(params=["directory", "s3"])
def object_store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty object store: a directory, then a bucket."""
    if request.param == "s3":
        url: str = request.getfixturevalue("s3_url")
        return url
    (tmp_path / "objects").mkdir()
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def fresh_database_url(database_url: str) -> Iterator[str]:
    """The URL of a new, empty database, dropped after the test with whoever is connected."""
    with _fresh(database_url) as url:
        yield url


@pytest.fixture(scope="session")
def migrated(database_url: str) -> Iterator[str]:
    """The name of a database with an empty log, to make others like it: copying one takes a tenth
    of what the migrations do. Nobody connects to it."""
    with _fresh(database_url) as url:
        migrate(url)
        yield urlsplit(url).path[1:]


@pytest.fixture
def log_url(database_url: str, migrated: str) -> Iterator[str]:
    """The URL of a new database with an empty log, dropped after the test."""
    with _fresh(database_url, migrated) as url:
        yield url


@pytest.fixture
def fresh_timescale_url(timescale_url: str) -> Iterator[str]:
    """The same on the server with TimescaleDB; the extension is not yet in it."""
    with _fresh(timescale_url) as url:
        yield url


@contextlib.contextmanager
def _fresh(database_url: str, template: str = "template0") -> Iterator[str]:
    # Not template1, which TimescaleDB's background workers may be looking into.
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        create = sql.SQL("create database {} template {}")
        connection.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
        try:
            yield urlunsplit(urlsplit(database_url)._replace(path=f"/{name}"))
        finally:
            drop = sql.SQL("drop database if exists {} with (force)")
            connection.execute(drop.format(sql.Identifier(name)))


@contextlib.contextmanager
def _running(spec: ProcessSpec) -> Iterator[None]:
    child = ChildProcess(spec)
    try:
        _run(child.wait_ready())
        yield
    finally:
        _run(child.stop())


def _run(coroutine: Coroutine[object, object, T]) -> T:
    # A loop of its own: asyncio.run would take away the one that the test plugin has set.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()
