"""The database: its URL as each driver takes it, and what all who connect have in common.

Imports no driver and no toolkit: see `connections` and `engine`.
"""

from __future__ import annotations

RECORDER_LOCK = 0x44536563_00000002
"""An advisory lock: `DSec` in ASCII, and a number."""

CONNECT_TIMEOUT_S = 10
COMMAND_TIMEOUT_S = 60.0
"""What a statement may take. A database that hangs is one that is away, not a service that hangs
with it. Well above the longest read, a session of a hundred thousand steps."""
POOL_CONNECTIONS_MAX = 5
_SCHEMES = {"postgres", "postgresql"}

POOLED_SQLSTATES = ("26000", "42P05")
"""A prepared statement is missing, or there is one of its name already: only what hands each
transaction another connection of the server brings that about."""
POOLED = (
    "DSEC_DATABASE_URL leads to a pooler that gives each transaction another connection of the "
    "server: give the server's own address, or a pooler whose connections last (pool_mode session)"
)

TIMESCALEDB_VERSION = "(select extversion from pg_extension where extname = 'timescaledb')"
"""In SQL: the version of TimescaleDB that a database has; null for none."""


class DatabaseError(Exception):
    """The database cannot be used as it is. Says what to do."""


def driver_url(database_url: str, driver: str) -> str:
    """A database URL for one of SQLAlchemy's drivers, whatever driver it names.

    Raises:
        DatabaseError: it is no PostgreSQL URL.
    """
    return f"postgresql+{driver}://{_behind_the_scheme(database_url)}"


def libpq_url(database_url: str) -> str:
    """A database URL as the drivers themselves take it.

    Raises:
        DatabaseError: it is no PostgreSQL URL.
    """
    return f"postgresql://{_behind_the_scheme(database_url)}"


def _behind_the_scheme(database_url: str) -> str:
    scheme, separator, rest = database_url.partition("://")
    if not separator or scheme.partition("+")[0] not in _SCHEMES:
        # Without a scheme, what stands there may be a password.
        shown = f"begins with {scheme}" if separator else "has no scheme"
        raise DatabaseError(f"DSEC_DATABASE_URL {shown}, not postgresql")
    return rest
