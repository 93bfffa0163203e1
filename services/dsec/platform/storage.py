"""How a database keeps the log, in words for people: what its edition has, and what it lacks.

The migrations decide it once, when the log is made, by what the server has then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg

from dsec.platform.db import TIMESCALEDB_VERSION, DatabaseError, libpq_url

STATUS_TIMEOUT_S = 3

_QUERY = f"""
select
    (select c.relkind = 'p' from pg_class c where c.oid = to_regclass('event_log')),
    {TIMESCALEDB_VERSION},
    current_setting('timescaledb.license', true),
    to_regprocedure('event_log_compress(integer, jsonb)') is not null
"""

_PARKED = "select event_type, count(*) from event_parked group by 1 order by 1"
_CONFLICTS = (
    "select kind, count(*) from event_aside where verdict = 'conflict' group by 1 order by 1"
)


@dataclass(frozen=True)
class LogStorage:
    """What holds `event_log`. `features`: compression and continuous aggregates are set up."""

    hypertable: bool
    timescaledb: str | None
    licence: str | None
    features: bool

    def sentence(self) -> str:
        """What it is and what it lacks."""
        if self.timescaledb is None:
            return (
                "The log is partitioned by PostgreSQL itself, a month each; without TimescaleDB "
                "there is no compression, and hourly rewards are a plain view."
            )
        if not self.hypertable:
            return (
                f"TimescaleDB {self.timescaledb} is there, and the log is not a hypertable: it was "
                "made without it, and is partitioned by PostgreSQL itself."
            )
        what = f"The log is a hypertable (TimescaleDB {self.timescaledb}, licence {self.licence})"
        if self.features:
            return f"{what}: finished chunks are compressed, hourly rewards are kept up."
        if self.licence == "timescale":
            return (
                f"{what}, made when the licence was another: no compression, and hourly rewards "
                "are a plain view."
            )
        return (
            f"{what}. This edition lacks compression, continuous aggregates and retention "
            "policies: hourly rewards are a plain view, and DSec's own retention "
            "(DSEC_RECORDER_RETENTION_DAYS) drops what is old."
        )


def log_storage(database_url: str) -> LogStorage | None:
    """How the log is kept; None before the migrations have made it.

    Raises:
        DatabaseError: the database does not answer.
    """
    rows = _asked(database_url, _QUERY)
    if not rows or rows[0][0] is None:
        return None
    native, version, licence, features = rows[0]
    return LogStorage(not native, version, licence if version else None, features)


def parked_messages(database_url: str) -> dict[str, int]:
    """How many messages of types that this version does not know wait for an upgrade, by type.

    Raises:
        DatabaseError: the database does not answer, or has no log.
    """
    return dict(_asked(database_url, _PARKED))


def conflicts(database_url: str) -> dict[str, int]:
    """How many outputs came a second time with another fact, by kind: determinism violations.

    Raises:
        DatabaseError: the database does not answer, or has no log.
    """
    return dict(_asked(database_url, _CONFLICTS))


def _asked(database_url: str, query: LiteralString) -> list[tuple[Any, ...]]:
    try:
        with psycopg.connect(
            libpq_url(database_url), connect_timeout=STATUS_TIMEOUT_S, autocommit=True
        ) as connection:
            return connection.execute(query).fetchall()
    except psycopg.Error as error:
        said = str(error).strip().splitlines() or [repr(error)]
        raise DatabaseError(f"the database does not answer: {said[0]}") from error
