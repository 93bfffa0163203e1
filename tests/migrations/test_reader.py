"""The role that only reads: all of the log, whenever its tables were made, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg
import psycopg
import pytest
from tests.migrations.conftest import SERVERS, Log

from dsec.platform.log import LogReader
from dsec.platform.migrations import migrate
from dsec.platform.stack.postgres_reader import READER, ensure_reader

pytestmark = pytest.mark.postgres

SESSION = UUID("01a22b62-cb9a-7845-b0fc-9a0059a193e6")
PASSWORD = "a-password-of-its-own"
WRITES = (
    "insert into session_live values (gen_random_uuid(), 1, 'w', 0, 'tick', now())",
    "delete from event_log",
    "update log_floor set sequence = 0",
    "create table mine (x int)",
    "drop view session_summary",
    "alter role dsec with password 'other'",
    "set role dsec",
    "copy event_log to program 'true'",
    "select rolpassword from pg_authid",
    "alter table event_log disable trigger all",
)


@pytest.fixture(params=SERVERS)
def owner_url(request: pytest.FixtureRequest) -> str:
    """The owner's URL of a new database."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def reader_url(owner_url: str) -> Iterator[str]:
    """The reader's, who is made before the tables are; a role is the whole server's."""

    async def make() -> None:
        connection = await asyncpg.connect(owner_url)
        await ensure_reader(connection, "another-password-before")
        await ensure_reader(connection, PASSWORD)
        await connection.close()

    asyncio.run(make())
    parts = urlsplit(owner_url)
    yield urlunsplit(parts._replace(netloc=f"{READER}:{PASSWORD}@{parts.hostname}:{parts.port}"))
    with psycopg.connect(owner_url, autocommit=True) as connection:
        connection.execute(f"drop owned by {READER}")
        connection.execute(f"drop role {READER}")


async def _rows(url: str) -> int:
    reader = await LogReader.connect(url)
    try:
        await reader.floor()
        return len(await reader.rows(SESSION))
    finally:
        await reader.close()


def test_all_of_the_log_is_read_and_nothing_written(owner_url: str, reader_url: str) -> None:
    migrate(owner_url)
    with psycopg.connect(owner_url, autocommit=True) as owner:
        Log(owner).put(SESSION, "requested", "session.requested", fact_json={"seed": 1})
        names = owner.execute(
            "select c.relname from pg_class c where c.relnamespace = 'public'::regnamespace"
            " and c.relkind in ('r', 'p', 'v', 'm') and c.relname <> 'alembic_version'"
        ).fetchall()
    assert asyncio.run(_rows(reader_url)) == 1
    with psycopg.connect(reader_url, autocommit=True) as reader:
        for (name,) in names:
            reader.execute(f'select * from "{name}" limit 1')
        for statement in WRITES:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                reader.execute(statement)  # type: ignore[arg-type]
    assert {"session_summary", "event_log"} <= {name for (name,) in names}
