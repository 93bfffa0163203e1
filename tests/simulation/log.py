"""A simulated PostgreSQL: the log's rows and floor, and what stands in the place of its clients.

The services keep their own readers and writers; only the statements are carried out here, each by
a function of the same name. Rows come in as the recorder's Arrow tables and go out as the driver
would give them. A server that is away raises what the driver raises; a commit whose answer is lost
was made all the same.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self
from uuid import UUID

import psycopg
from tests.simulation.clock import Process, VirtualLoop
from tests.simulation.switches import Switches

from dsec.platform.log import LogReader, LogUnavailable, Position
from dsec.recorder import live, trim
from dsec.recorder.writer import CONFLICT_KINDS, Aside, Commit, Floor, Writer
from dsec.scheduler import history
from dsec.scheduler.history import History
from dsec.session.log_row import LogRow
from dsec_contracts import keys

Row = dict[str, Any]
LOCK_KEPT_S = 0.05
"""How long the server takes to notice that a client is gone."""
_SYSTEM = keys.SYSTEM_SESSION.bytes


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


# -- readers -----------------------------------------------------------------------------------


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

    async def row(self, session_id: UUID, key: str) -> LogRow | None:
        """See `LogReader`."""

        def find() -> LogRow | None:
            found = self._database.get(session_id, key)
            return None if found is None else log_row(found)

        return await self._ask("row", find)  # type: ignore[no-any-return]


class SchedulersHistory(History):
    """The scheduler's queries, with a simulated server behind them."""

    def __init__(self, database: Database, process: Process) -> None:
        self._database = database
        self._process = process
        self._log = Reader(database, process)

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _rows(self, query: Any, parameters: dict[str, Any]) -> list[Any]:
        statement = _STATEMENTS[query]

        def find() -> list[Any]:
            return statement(self._database, parameters)

        return await self._database.ask(self._process, statement.__name__, find)  # type: ignore[no-any-return]


def _code(row: Row | None) -> str | None:
    return None if row is None else json.loads(row["circumstance"] or "{}").get("code")


def _told(row: Row) -> tuple[Any, ...]:
    return (
        row["kind"],
        row["epoch"],
        row["sequence"],
        row["fact"],
        row["circumstance"],
        row["event_time"],
    )


def _upto(row: Row, p: dict[str, Any]) -> bool:
    return (row["epoch"], row["sequence"]) <= (p["epoch"], p["sequence"])


def floor_row(db: Database, p: dict[str, Any]) -> list[Any]:
    """The floor."""
    row = db.floor()
    if row is None:
        return []
    return [(row["epoch"], row["sequence"], row["stream_created"], row["message_time"])]


def specs(db: Database, p: dict[str, Any]) -> list[Any]:
    """Hash and kind of every spec."""
    facts = [json.loads(row["fact_json"]) for row in db.rows if row["kind"] == "spec.registered"]
    return [(fact["spec_hash"], fact["kind"]) for fact in facts]


def policies(db: Database, p: dict[str, Any]) -> list[Any]:
    """The key of every policy."""
    return [(row["key"],) for row in db.rows if row["kind"] == "policy.published"]


def fences(db: Database, p: dict[str, Any]) -> list[Any]:
    """Fences up to a floor."""
    return [_told(row) for row in db.rows if row["kind"] == "worker.fenced" and _upto(row, p)]


def placed(db: Database, p: dict[str, Any]) -> list[Any]:
    """What was said of sessions that were placed and have not ended."""
    kinds = (
        "session.requested",
        "session.cancel_requested",
        "session.placed",
        "session.released",
    )
    begun = {row["session_id"] for row in db.rows if row["key"] == "placed:1"}
    over = {row["session_id"] for row in db.rows if row["key"] == keys.ENDED}
    return [
        _told(row)
        for row in db.rows
        if row["kind"] in kinds
        and row["session_id"] in begun
        and row["session_id"] not in over
        and _upto(row, p)
    ]


def ended_since(db: Database, p: dict[str, Any]) -> list[Any]:
    """Only traces are made of it, and telemetry is off."""
    return []


def waiting(db: Database, p: dict[str, Any]) -> list[Any]:
    """Requests that nothing came of yet."""
    found = []
    for row in sorted(db.rows, key=place):
        if row["kind"] != "session.requested" or not _upto(row, p):
            continue
        if (row["epoch"], row["sequence"]) < (p["from_epoch"], p["from_sequence"]):
            continue
        session_id = UUID(bytes=row["session_id"])
        if db.get(session_id, keys.ENDED) or db.get(session_id, "placed:1"):
            continue
        if db.get(keys.SYSTEM_SESSION, keys.rejected(row["event_id"])):
            continue
        cancel = db.get(session_id, keys.CANCEL_REQUESTED)
        found.append((row["event_id"], row["epoch"], row["sequence"], row["fact"], _code(cancel)))
    return found[: p["limit"]]


def prior(db: Database, p: dict[str, Any]) -> list[Any]:
    """What is known of ids."""
    found = []
    for session_id in p["ids"]:
        for key in (keys.REQUESTED, keys.CANCEL_REQUESTED):
            row = db.get(session_id, key)
            if row is not None:
                refused = db.get(keys.SYSTEM_SESSION, keys.rejected(row["event_id"])) is not None
                at = row["epoch"], row["sequence"]
                found.append((session_id, key, *at, row["fact"], _code(row), refused))
    return found


def tail(db: Database, p: dict[str, Any]) -> list[Any]:
    """How far a session got."""
    rows = [row for row in db.of(p["id"]) if row["kind"] == "session.stepped"]
    started = db.get(p["id"], keys.STARTED)
    last = max(rows, key=lambda row: row["step"], default=None)
    return [
        (
            None if started is None else started["chain"],
            None if last is None else last["chain"],
            len(rows),
            0 if last is None else last["step"] + 1,
            sum(bool(row["terminated"] or row["truncated"]) for row in rows),
        )
    ]


_STATEMENTS: dict[Any, Callable[[Database, dict[str, Any]], list[Any]]] = {
    history._FLOOR: floor_row,
    history._SPECS: specs,
    history._POLICIES: policies,
    history._FENCES: fences,
    history._PLACED: placed,
    history._ENDED_SINCE: ended_since,
    history._WAITING: waiting,
    history._PRIOR: prior,
    history._TAIL: tail,
}


# -- the recorder's connections ----------------------------------------------------------------


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
        write = self._merge if through_stage else self._copy
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

    def _copy(self, rows: list[Row]) -> list[Aside]:
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

    def _merge(self, rows: list[Row]) -> list[Aside]:
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
