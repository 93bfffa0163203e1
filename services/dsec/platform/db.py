"""The database: engines. The only place that turns a URL into a driver's."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, NullPool, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

RECORDER_LOCK = 0x44536563_00000002
"""An advisory lock: `DSec` in ASCII, and a number."""

CONNECT_TIMEOUT_S = 10
COMMAND_TIMEOUT_S = 60.0
"""What a statement may take. A database that hangs is one that is away, not a service that hangs
with it. Well above the longest read, a session of a hundred thousand steps."""
POOL_CONNECTIONS_MAX = 5
_SCHEMES = {"postgres", "postgresql"}

TIMESCALEDB_VERSION = "(select extversion from pg_extension where extname = 'timescaledb')"
"""In SQL: the version of TimescaleDB that a database has; null for none."""


class DatabaseError(Exception):
    """The database cannot be used as it is. Says what to do."""


def driver_url(database_url: str, driver: str) -> URL:
    """A database URL for one driver, whatever driver it names.

    Raises:
        DatabaseError: it is no PostgreSQL URL.
    """
    url = make_url(database_url)
    if url.drivername.partition("+")[0] not in _SCHEMES:
        raise DatabaseError(f"DSEC_DATABASE_URL begins with {url.drivername}, not postgresql")
    return url.set(drivername=f"postgresql+{driver}")


def libpq_url(database_url: str) -> str:
    """A database URL as psycopg itself takes it."""
    url = driver_url(database_url, "psycopg").set(drivername="postgresql")
    return url.render_as_string(hide_password=False)


def async_engine(
    database_url: str,
    *,
    connections_max: int = POOL_CONNECTIONS_MAX,
    transaction_pooler: bool = False,
    command_timeout_s: float = COMMAND_TIMEOUT_S,
) -> AsyncEngine:
    """An engine on asyncpg.

    Args:
        transaction_pooler: behind a pooler that hands out a server connection for each
            transaction, prepared statements turn up missing or double: name and keep none.
        command_timeout_s: a statement that takes longer raises `TimeoutError`.
    """
    connect_args: dict[str, Any] = {
        "timeout": CONNECT_TIMEOUT_S,
        "command_timeout": command_timeout_s,
    }
    # A connection that died with a restart of the server is found out before it is used.
    options: dict[str, Any] = {
        "pool_size": connections_max,
        "max_overflow": 0,
        "pool_pre_ping": True,
    }
    if transaction_pooler:
        connect_args |= {
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": lambda: "",
        }
        options = {"poolclass": NullPool}
    return create_async_engine(
        driver_url(database_url, "asyncpg"), connect_args=connect_args, **options
    )
