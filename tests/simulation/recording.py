"""The recorder's two connections. Its transactions are made here as its statements make them: all
rows or none, the floor with them, and a copy that meets a duplicate is refused as a whole."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Self
from uuid import UUID

import psycopg
from tests.simulation.clock import Process
from tests.simulation.log import Away, Database, Row, place

from dsec.recorder import live, trim
from dsec.recorder.writer import CONFLICT_KINDS, Aside, Commit, Floor, Writer

LOCK_KEPT_S = 0.05
"""How long the server takes to notice that a client is gone."""


class RecordersWriter(Writer):
    """The writing connection. It has the lock, and loses it when it breaks."""

    def __init__(self, database: Database, process: Process) -> None:
        self._database = database
        self._process = process
        self._starts = database.starts
        self._closed = False
        process.on_death.append(self._lose)

    def _lose(self) -> None:
        self._database.loop.later(LOCK_KEPT_S, self._give_up)

    def _give_up(self) -> None:
        if self._database.locked_by is self:
            self._database.locked_by = None

    async def close(self) -> None:
        """Close, and give up the lock with it."""
        self._closed = True
        self._give_up()

    async def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        database = self._database

        def checked() -> Any:
            if self._closed or self._starts != database.starts:
                raise Away("the connection is closed")
            return call()

        try:
            return await database.ask(self._process, what, checked)
        except Away as error:
            self._closed = True
            self._give_up()
            raise psycopg.OperationalError(str(error)) from error

    async def try_lock(self) -> bool:
        """See `Writer`."""

        def lock() -> bool:
            if self._database.locked_by in (None, self):
                self._database.locked_by = self
            return self._database.locked_by is self

        return await self._ask("lock", lock)  # type: ignore[no-any-return]

    async def floor(self) -> Floor | None:
        """See `Writer`."""

        def find() -> Floor | None:
            row = self._database.floor()
            names = ("epoch", "stream_created", "sequence", "message_time")
            return None if row is None else Floor(*(row[name] for name in names))

        return await self._ask("floor", find)  # type: ignore[no-any-return]

    async def start_epoch(self, floor: Floor) -> None:
        """See `Writer`."""
        row = {
            "epoch": floor.epoch,
            "stream_created": floor.stream_created,
            "sequence": floor.sequence,
            "message_time": None,
            "placements_trimmed": 0,
        }
        await self._ask("epoch", lambda: self._database.floors.append(row))

    async def ensure_partition(self, time: datetime, partitions_max: int) -> bool:
        """See `Writer`."""
        return True

    async def has_default_partition(self) -> bool:
        """See `Writer`."""
        return True

    async def parked(self, types: Any, messages_max: int) -> list[Any]:
        """See `Writer`."""
        return []

    async def _append(
        self, commit: Commit, data: bytes | None, *, through_stage: bool
    ) -> list[Aside]:
        rows: list[Row] = sorted(commit.table.to_pylist(), key=place)
        write = self._merged if through_stage else self._copied
        database = self._database

        def transaction() -> list[Aside]:
            aside = write(rows)
            database.parked += len(commit.parked)
            if commit.message_time is not None:
                for floor in database.floors:
                    if floor["epoch"] == commit.epoch and floor["sequence"] < commit.sequence:
                        floor["sequence"] = commit.sequence
                        floor["message_time"] = commit.message_time
            database.trace(f"{self._process}: {len(rows)} rows, floor {commit.sequence}")
            return aside

        aside: list[Aside] = await self._ask("commit", transaction)
        if database.chance.random() < database.lost_commits_share:
            raise psycopg.OperationalError("the answer to a commit is lost")
        return aside

    def _copied(self, rows: list[Row]) -> list[Aside]:
        database = self._database
        seen: set[tuple[bytes, str]] = set()
        for row in rows:
            key = row["session_id"], row["key"]
            if database.switches.natural_key and (database.has(row) is not None or key in seen):
                raise psycopg.errors.UniqueViolation("duplicate key")
            seen.add(key)
        for row in rows:
            database.insert(row)
        return []

    def _merged(self, rows: list[Row]) -> list[Aside]:
        database = self._database
        aside: list[Aside] = []
        for row in rows:
            kept = database.has(row)
            if kept is None:
                database.insert(row)
            elif kept["fact"] != row["fact"]:
                known = any(
                    one["session_id"] == row["session_id"]
                    and one["key"] == row["key"]
                    and one["fact"] == row["fact"]
                    for one, _ in database.aside
                )
                if not known:
                    verdict = "conflict" if row["kind"] in CONFLICT_KINDS else "superseded"
                    database.aside.append((row, verdict))
                    aside.append(Aside(UUID(bytes=row["session_id"]), row["key"], verdict))
        return aside


class BesideConnection:
    """The recorder's other connection: what it tells of now, and trims."""

    def __init__(self, database: Database, process: Process) -> None:
        self._database = database
        self._process = process

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    async def execute(self, query: str, parameters: Any = ()) -> _Cursor:
        """Carry a statement of the recorder's out."""
        try:
            found = await self._database.ask(
                self._process, "beside", lambda: self._found(query, parameters)
            )
        except Away as error:
            raise psycopg.OperationalError(str(error)) from error
        return _Cursor(found)

    def _found(self, query: str, parameters: Any) -> list[Any]:
        database = self._database
        if query in (live._UPSERT, live._FORGET):
            return []
        if query == trim._FLOOR:
            return [tuple(row.values()) for row in database.floors if row["epoch"] == parameters[0]]
        if query == trim._ENDED:
            epoch, after, upto, limit = parameters
            found = [
                (UUID(bytes=row["session_id"]), row["sequence"])
                for row in sorted(database.rows, key=place)
                if row["kind"] == "session.ended"
                and row["epoch"] == epoch
                and after < row["sequence"] <= upto
            ]
            return found[:limit]
        if query == trim._SET_TRIMMED:
            for row in database.floors:
                if row["epoch"] == parameters[1]:
                    row["placements_trimmed"] = parameters[0]
            return []
        raise AssertionError(f"no such statement here: {query}")


class _Cursor:
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    async def fetchone(self) -> Any:
        return self._rows[0] if self._rows else None

    async def fetchall(self) -> list[Any]:
        return self._rows
