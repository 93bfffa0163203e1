"""What a PostgreSQL says of itself, asked once, for those who examine a machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import NullPool, create_engine, text

from dsec.platform.db import TIMESCALEDB_VERSION, driver_url

CONNECT_WAIT_S = 4
STATEMENT_WAIT_MS = 5000
SETTINGS = (
    "server_version",
    "server_version_num",
    "server_encoding",
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "wal_level",
    "max_connections",
    "timescaledb.license",
)


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """A server and one of its databases.

    `timescaledb` is the version that this database has, `timescaledb_offered` the one that could
    be added; empty for none. `has_log`: the log's tables are in it. Times are in seconds since
    1970, ours read before and after theirs.
    """

    settings: Mapping[str, str]
    timescaledb: str
    timescaledb_offered: str
    in_recovery: bool
    may_create: bool
    has_log: bool
    before_s: float
    there_s: float
    after_s: float


_ABOUT = f"""
select pg_is_in_recovery() as in_recovery,
    coalesce(has_schema_privilege(current_schema(), 'CREATE'), false) as may_create,
    to_regclass('event_log') is not null as has_log,
    {TIMESCALEDB_VERSION} as installed,
    (select default_version from pg_available_extensions where name = 'timescaledb') as offered
"""


def database_facts(database_url: str) -> DatabaseFacts:
    """Ask a database what it is. Blocks.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: it does not answer, or refuses the client.
        DatabaseError: the URL is of another kind of database.
    """
    engine = create_engine(
        driver_url(database_url, "psycopg"),
        poolclass=NullPool,
        connect_args={
            "connect_timeout": CONNECT_WAIT_S,
            # Set after connecting: a pooler refuses options at the start.
            "prepare_threshold": None,
        },
    )
    try:
        with engine.connect() as connection:
            connection.execute(text(f"set local statement_timeout = {STATEMENT_WAIT_MS}"))
            about = connection.execute(text(_ABOUT)).one()
            found = connection.execute(
                text("select name, setting from pg_settings where name = any(:names)"),
                {"names": list(SETTINGS)},
            )
            settings = {row.name: row.setting for row in found}
            before_s = time.time()
            there_s = connection.execute(
                text("select extract(epoch from clock_timestamp())")
            ).scalar_one()
            after_s = time.time()
    finally:
        engine.dispose()
    return DatabaseFacts(
        settings=settings,
        timescaledb=about.installed or "",
        timescaledb_offered=about.offered or "",
        in_recovery=about.in_recovery,
        may_create=about.may_create,
        has_log=about.has_log,
        before_s=before_s,
        there_s=float(there_s),
        after_s=after_s,
    )
