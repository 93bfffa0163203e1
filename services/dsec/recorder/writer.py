"""Writing the log: binary COPY straight into `event_log`, staging only where that meets a
duplicate.

The connection that writes is the one that holds the advisory lock, so a recorder that lost the
lock has lost its pen with it. The floor moves in the same transaction as the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import psycopg
import pyarrow as pa
from pgpq import ArrowToPostgresBinaryEncoder
from psycopg import sql

from dsec.platform.crash_points import reached
from dsec.platform.db import RECORDER_LOCK
from dsec.recorder.connection import connect
from dsec.recorder.rows import SCHEMA, Parked
from dsec_contracts import AnchorCaptured, SessionStarted, SessionStepped, ToolCalled

log = logging.getLogger(__name__)

CONFLICT_KINDS = tuple(
    event.event_name() for event in (SessionStepped, SessionStarted, ToolCalled, AnchorCaptured)
)
"""Outputs that are re-executed: another fact under their key is a determinism violation. Of
everything else the first counts and a later one is superseded."""

_DATA_CLASSES = ("22", "23", "54")
"""SQLSTATE classes that speak of the rows: bad values, constraints, and limits of size."""

_COLUMNS = sql.SQL(", ").join(sql.Identifier(name) for name in SCHEMA.names)
_COPY = sql.SQL("copy {} ({}) from stdin (format binary)")
_STAGE = "create temp table if not exists event_stage (like event_log) on commit delete rows"
_MERGE = sql.SQL(
    "insert into event_log ({columns}) select {columns} from event_stage"
    ' order by epoch, sequence, "index" on conflict do nothing'
).format(columns=_COLUMNS)
_ASIDE = sql.SQL(
    "insert into event_aside ({columns}, verdict, kept_epoch, kept_sequence, kept_index)"
    " select {staged},"
    " case when s.kind = any(%s) then 'conflict' else 'superseded' end,"
    ' k.epoch, k.sequence, k."index"'
    " from event_stage s join event_log k"
    " on k.session_id = s.session_id and k.session_at = s.session_at and k.key = s.key"
    " where k.fact <> s.fact and not exists ("
    "  select from event_aside a"
    "  where a.session_id = s.session_id and a.key = s.key and a.fact = s.fact)"
    " on conflict do nothing"
    " returning session_id, key, verdict"
).format(
    columns=_COLUMNS,
    staged=sql.SQL(", ").join(sql.Identifier("s", name) for name in SCHEMA.names),
)
_FLOOR = "update log_floor set sequence = %s, message_time = %s where epoch = %s and sequence < %s"
_PARK = (
    "insert into event_parked (epoch, sequence, subject, event_type, headers, body)"
    " values (%s, %s, %s, %s, %s, %s) on conflict do nothing"
)
_UNPARK = "delete from event_parked where epoch = %s and sequence = any(%s)"
_PARKED = (
    "select epoch, sequence, subject, event_type, headers::text, body from event_parked"
    " where event_type = any(%s) order by epoch, sequence limit %s"
)


class RowsRefused(Exception):
    """The database refuses a batch for what is in it."""


@dataclass(frozen=True, slots=True)
class Floor:
    """How far the log has the stream: all up to `sequence` is committed."""

    epoch: int
    stream_created: datetime
    sequence: int
    message_time: datetime | None


@dataclass(frozen=True, slots=True)
class Commit:
    """What one transaction writes: rows, parked messages, and the floor that they reach."""

    epoch: int
    table: pa.Table
    parked: Sequence[Parked] = ()
    sequence: int = 0
    message_time: datetime | None = None
    """Of the message at `sequence`; None leaves the floor where it is."""
    unparked: Sequence[int] = ()
    """Sequences of parked messages whose rows are in `table`."""


@dataclass(frozen=True, slots=True)
class Aside:
    """A fact that was put aside."""

    session_id: Any
    key: str
    verdict: str


class Writer:
    """The writing connection."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, database_url: str) -> Self:
        """Connect."""
        return cls(await connect(database_url, "dsec-recorder"))

    async def close(self) -> None:
        """Close, and give up the lock with it."""
        await self._connection.close()

    async def try_lock(self) -> bool:
        """Become the one recorder that writes, if there is none."""
        cursor = await self._connection.execute("select pg_try_advisory_lock(%s)", (RECORDER_LOCK,))
        row = await cursor.fetchone()
        return bool(row and row[0])

    # -- the floor -----------------------------------------------------------------------------

    async def floor(self) -> Floor | None:
        """The floor of the current epoch; None before the first."""
        cursor = await self._connection.execute(
            "select epoch, stream_created, sequence, message_time from log_floor"
            " order by epoch desc limit 1"
        )
        row = await cursor.fetchone()
        return Floor(*row) if row else None

    async def start_epoch(self, floor: Floor) -> None:
        """Write the floor of a new epoch."""
        await self._connection.execute(
            "insert into log_floor (epoch, stream_created, sequence) values (%s, %s, %s)",
            (floor.epoch, floor.stream_created, floor.sequence),
        )

    async def ensure_partition(self, time: datetime, partitions_max: int) -> bool:
        """Make the partition of a time; False where the default one has to serve."""
        cursor = await self._connection.execute(
            "select event_log_partition(%s, %s)", (time, partitions_max)
        )
        row = await cursor.fetchone()
        return bool(row and row[0])

    async def has_default_partition(self) -> bool:
        """Whether rows of any time have a place; a hypertable makes a chunk for each."""
        cursor = await self._connection.execute("select to_regclass('event_log_default')")
        row = await cursor.fetchone()
        return bool(row and row[0])

    async def drop_before(self, time: datetime) -> list[str]:
        """Drop partitions or chunks that end before a time and hold no open session.

        Raises:
            psycopg.errors.LockNotAvailable: somebody reads them for longer than is waited.
        """
        cursor = await self._connection.execute("select event_log_drop(%s)", (time,))
        return [name for (name,) in await cursor.fetchall()]

    # -- rows ----------------------------------------------------------------------------------

    async def append(self, commit: Commit) -> list[Aside]:
        """Commit rows and the floor they reach, together. Returns what was put aside.

        Raises:
            RowsRefused: for the content of the rows; nothing is committed.
            psycopg.Error: the database is away or out of order; nothing is known.
        """
        data = encode(commit.table) if commit.table.num_rows else None
        try:
            try:
                return await self._append(commit, data, through_stage=False)
            except psycopg.errors.UniqueViolation:
                return await self._append(commit, data, through_stage=True)
        except psycopg.Error as error:
            raise refused(error) from error

    async def _append(
        self, commit: Commit, data: bytes | None, *, through_stage: bool
    ) -> list[Aside]:
        aside: list[Aside] = []
        async with self._connection.transaction(), self._connection.cursor() as cursor:
            if data is not None and through_stage:
                aside = await self._merge(cursor, data)
            elif data is not None:
                await _copy(cursor, "event_log", data)
            for p in commit.parked:
                await cursor.execute(
                    _PARK,
                    (commit.epoch, p.sequence, p.subject, p.event_type, p.headers_json, p.body),
                )
            if commit.unparked:
                await cursor.execute(_UNPARK, (commit.epoch, list(commit.unparked)))
            if commit.message_time is not None:
                await cursor.execute(
                    _FLOOR, (commit.sequence, commit.message_time, commit.epoch, commit.sequence)
                )
            reached("commit.before")
        reached("commit.after")
        return aside

    async def _merge(self, cursor: psycopg.AsyncCursor[Any], data: bytes) -> list[Aside]:
        await cursor.execute(_STAGE)
        await _copy(cursor, "event_stage", data)
        await cursor.execute(_MERGE)
        await cursor.execute(_ASIDE, (list(CONFLICT_KINDS),))
        return [Aside(*row) for row in await cursor.fetchall()]

    async def parked(self, types: Sequence[str], messages_max: int) -> list[tuple[int, Parked]]:
        """Parked messages of these types, with their epochs, in the order of the stream."""
        cursor = await self._connection.execute(_PARKED, (list(types), messages_max))
        return [(epoch, Parked(*rest)) for epoch, *rest in await cursor.fetchall()]

    async def refused_rows(self, table: pa.Table) -> dict[int, str]:
        """Which rows of a table the database refuses, by row number, and why. Writes nothing."""
        bad: dict[int, str] = {}
        pending = [(0, table.num_rows)]
        while pending:
            start, end = pending.pop()
            if start == end:
                continue
            error = await self._try(table.slice(start, end - start))
            if error is None:
                continue
            if end - start == 1:
                bad[start] = error
            else:
                middle = (start + end) // 2
                pending += [(start, middle), (middle, end)]
        return bad

    async def _try(self, table: pa.Table) -> str | None:
        data = encode(table)
        try:
            async with (
                self._connection.transaction(force_rollback=True),
                self._connection.cursor() as cursor,
            ):
                await self._merge(cursor, data)
        except psycopg.Error as error:
            known = refused(error)
            if isinstance(known, RowsRefused):
                return str(known)
            raise
        return None


def refused(error: psycopg.Error) -> Exception:
    """What an error means: the rows' own fault, or the database's (then the error itself)."""
    if error.sqlstate and error.sqlstate[:2] in _DATA_CLASSES:
        return RowsRefused(f"{error.sqlstate}: {error.diag.message_primary or error}")
    return error


def encode(table: pa.Table) -> bytes:
    """A table in PostgreSQL's binary COPY format."""
    encoder = ArrowToPostgresBinaryEncoder(SCHEMA)
    parts = [encoder.write_header()]
    parts += [encoder.write_batch(batch) for batch in table.to_batches()]
    parts.append(encoder.finish())
    return b"".join(parts)


async def _copy(cursor: psycopg.AsyncCursor[Any], table: str, data: bytes) -> None:
    async with cursor.copy(_COPY.format(sql.Identifier(table), _COLUMNS)) as copy:
        await copy.write(data)
