"""Connections for those who read the log: asyncpg alone, opened as they are needed.

Not `engine`, because SQLAlchemy is a fifth of a second of CPU at the start of a process, and
most of a stack's read the log with the driver's own calls and never need a toolkit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import asyncpg

from dsec.platform.db import (
    COMMAND_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    POOL_CONNECTIONS_MAX,
    POOLED,
    DatabaseError,
    libpq_url,
)

CONNECTION_WAIT_S_MAX = 30.0

AWAY = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
)
"""How it shows that the database is away, or a connection to it is lost."""

_STALE = (
    ConnectionError,
    asyncpg.InterfaceError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
)
"""How a connection fails whose server has restarted since it was last used."""

_POOLED = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
"""How a pooler shows that hands out transactions; see `POOLED`."""


class DatabaseAway(Exception):
    """The database cannot be reached. It may be back at the next attempt."""


class Connections:
    """A pool of connections. Several queries may run at once, each on one of them."""

    def __init__(
        self,
        database_url: str,
        *,
        connections_max: int = POOL_CONNECTIONS_MAX,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> None:
        """No connection is opened yet.

        Args:
            command_timeout_s: what a statement may take.

        Raises:
            DatabaseError: it is no PostgreSQL URL.
        """
        self._options: dict[str, Any] = {
            "dsn": libpq_url(database_url),
            "min_size": 0,
            "max_size": connections_max,
            "timeout": CONNECT_TIMEOUT_S,
            "command_timeout": command_timeout_s,
            # Nothing here changes what a connection is set to: there is nothing to reset.
            "reset": _as_it_is,
            "init": _with_json,
        }
        self._pool: Any = None

    async def close(self) -> None:
        """Close them, whatever they are at."""
        if self._pool is not None:
            self._pool.terminate()

    async def fetch(self, query: str, *arguments: object) -> Sequence[Any]:
        """The rows of a query, as the driver's records. The query may run twice.

        Raises:
            DatabaseAway: the database cannot be reached, or does not answer in time.
            DatabaseError: a pooler stands before it, of the kind that cannot be used.
            asyncpg.PostgresError: it refuses the query.
        """
        if self._pool is None:
            self._pool = await asyncpg.create_pool(**self._options)  # opens none: no await in it
        try:
            try:
                return await self._fetched(query, arguments)
            except _STALE:
                return await self._fetched(query, arguments)
        except _POOLED as error:
            raise DatabaseError(POOLED) from error
        except AWAY as error:
            raise DatabaseAway(f"{error}" or repr(error)) from error

    async def _fetched(self, query: str, arguments: Sequence[object]) -> Sequence[Any]:
        try:
            connection = await self._pool.acquire(timeout=CONNECTION_WAIT_S_MAX)
        except asyncpg.PostgresError as error:  # who may not connect has no database
            raise DatabaseAway(f"{error}") from error
        try:
            records: Sequence[Any] = await connection.fetch(query, *arguments)
            return records
        except asyncpg.PostgresError:
            raise
        except BaseException:
            # Nobody knows what is on its way there and back, and a database that hangs would hang
            # whoever waits to find out.
            connection.terminate()
            raise
        finally:
            await self._pool.release(connection)


async def _with_json(connection: asyncpg.Connection) -> None:
    """JSON comes as values, of both types."""
    for name in ("json", "jsonb"):
        await connection.set_type_codec(
            name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog"
        )


async def _as_it_is(connection: object) -> None:
    """What a pool is told to reset by."""
