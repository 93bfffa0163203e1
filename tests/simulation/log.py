"""A simulated PostgreSQL: the log's rows and floor, and what stands in the place of its clients.

The services keep their own readers and writers; only the statements are carried out here, each by
a function of the same name. Rows come in as the recorder's Arrow tables and go out as the driver
would give them. A server that is away raises what the driver raises; a commit whose answer is lost
was made all the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tests.simulation.clock import Process, VirtualLoop
from tests.simulation.switches import Switches

from dsec.platform.log import LogReader, LogUnavailable, Position
from dsec.session.log_row import LogRow
from dsec_contracts import keys

Row = dict[str, Any]


class Away(OSError):
    """The server is not there."""


@dataclass(slots=True)
class Database:
    """The server."""

    loop: VirtualLoop
    chance: random.Random
    switches: Switches
    trace: Callable[[str], None]
    boundary: Callable[[Process, str, str], bool]
    delay_s_max: float = 0.002
    lost_commits_share: float = 0.0
    rows: list[Row] = field(default_factory=list)
    aside: list[tuple[Row, str]] = field(default_factory=list)
    floors: list[Row] = field(default_factory=list)
    parked: int = 0
    away: bool = False
    starts: int = 0
    """Of the server. A connection of an earlier one is broken."""
    locked_by: object = None
    _index: dict[tuple[bytes, str], Row] = field(default_factory=dict)

    async def ask(self, process: Process, what: str, call: Callable[[], Any]) -> Any:
        """Carry a statement out.

        Raises:
            Away: the server is not there, before or after it did.
        """
        loop = self.loop
        if process.dead or self.boundary(process, what, "before"):
            await loop.create_future()
        await asyncio.sleep(self.chance.uniform(0.0001, self.delay_s_max))
        if self.away:
            raise Away("the database is away")
        starts, result = self.starts, call()
        if self.boundary(process, what, "after"):
            await loop.create_future()
        await asyncio.sleep(self.chance.uniform(0.0001, self.delay_s_max))
        if self.away or self.starts != starts:
            raise Away("the database went away")
        return result

    def go_away(self) -> None:
        """The server is killed."""
        self.away = True
        self.locked_by = None

    def come_back(self) -> None:
        """And started again."""
        self.away = False
        self.starts += 1

    # -- what it holds -------------------------------------------------------------------------

    def get(self, session_id: UUID, key: str) -> Row | None:
        """The row under a natural key."""
        return self._index.get((session_id.bytes, key))

    def of(self, session_id: UUID) -> list[Row]:
        """A session's rows in the order of the log."""
        raw = session_id.bytes
        return sorted((row for row in self.rows if row["session_id"] == raw), key=place)

    def floor(self) -> Row | None:
        """The floor of the last epoch."""
        return self.floors[-1] if self.floors else None

    def has(self, row: Row) -> Row | None:
        """The row that has another's key."""
        return self._index.get((row["session_id"], row["key"]))

    def insert(self, row: Row) -> None:
        """One more row."""
        self.rows.append(row)
        self._index.setdefault((row["session_id"], row["key"]), row)


def place(row: Row) -> tuple[int, int, int]:
    """Where a row stands."""
    return row["epoch"], row["sequence"], row["index"]


def log_row(row: Row) -> LogRow:
    """A row as the reader's driver gives it."""

    def text(name: str) -> str | None:
        value: bytes | None = row[name]
        return None if value is None else value.decode()

    found = {name: row[name] for name in LogRow._fields}
    return LogRow(
        **found
        | {
            "session_id": UUID(bytes=row["session_id"]),
            "policy": text("policy"),
            "cause": text("cause"),
        }
    )


class Reader(LogReader):
    """The log's reader, with a simulated server behind it."""

    def __init__(self, database: Database, process: Process) -> None:
        self._database = database
        self._process = process

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return await self._database.ask(self._process, what, call)
        except Away as error:
            raise LogUnavailable(str(error)) from error

    async def floor(self) -> Position:
        """See `LogReader`."""
        database = self._database

        def find() -> Position:
            row = database.floor()
            if row is None:
                return Position(0, 0)
            if not database.switches.floor_wait:
                return Position(row["epoch"], 1 << 60)
            return Position(row["epoch"], row["sequence"])

        return await self._ask("floor", find)  # type: ignore[no-any-return]

    async def rows(
        self, session_id: UUID, *, upto: int | None = None, epoch: int | None = None
    ) -> list[LogRow]:
        """See `LogReader`."""
        database = self._database

        def find() -> list[LogRow]:
            found = database.of(session_id)
            if upto is not None:
                floor = database.floor()
                at = epoch if epoch is not None else floor["epoch"] if floor else 0
                found = [row for row in found if (row["epoch"], row["sequence"]) <= (at, upto)]
            return list(map(log_row, found))

        return await self._ask("rows", find)  # type: ignore[no-any-return]

    async def service_declarations(self) -> list[LogRow]:
        """See `LogReader`."""

        def find() -> list[LogRow]:
            rows = self._database.of(keys.SYSTEM_SESSION)
            return [log_row(row) for row in rows if row["key"].startswith("service:")]

        return await self._ask("services", find)  # type: ignore[no-any-return]

    async def row(self, session_id: UUID, key: str) -> LogRow | None:
        """See `LogReader`."""

        def find() -> LogRow | None:
            found = self._database.get(session_id, key)
            return None if found is None else log_row(found)

        return await self._ask("row", find)  # type: ignore[no-any-return]
