"""SQLAlchemy's engine, for those who ask in named parameters: the scheduler, the client.

Apart from `db`, since most processes need none of it. See `connections`.
"""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from dsec.platform.connections import AWAY
from dsec.platform.db import (
    COMMAND_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    POOL_CONNECTIONS_MAX,
    driver_url,
)


def is_away(error: BaseException) -> bool:
    """Whether the database is away and may be back, as against a question that it refuses."""
    return isinstance(error, (DBAPIError, *AWAY)) and not isinstance(error, ProgrammingError)


def async_engine(database_url: str, connections_max: int = POOL_CONNECTIONS_MAX) -> AsyncEngine:
    """An engine on asyncpg. A statement that takes `COMMAND_TIMEOUT_S` raises `TimeoutError`.

    Raises:
        DatabaseError: it is no PostgreSQL URL.
    """
    return create_async_engine(
        driver_url(database_url, "asyncpg"),
        connect_args={"timeout": CONNECT_TIMEOUT_S, "command_timeout": COMMAND_TIMEOUT_S},
        pool_size=connections_max,
        max_overflow=0,
        # A connection that died with a restart of the server is found out before it is used.
        pool_pre_ping=True,
    )
