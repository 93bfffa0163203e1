"""Reading the log. What is returned is never above the floor that a caller waits for.

A higher position can be visible before a lower one commits only if several write; here one
recorder does, in order, and its floor moves in the same transaction as the rows. Readers still go
by the floor, not by what they happen to see.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self
from uuid import UUID

from dsec.platform.connections import Connections, DatabaseAway
from dsec.session.log_row import LogRow
from dsec_contracts import SYSTEM_SESSION, canonical, keys
from dsec_contracts.spec import SpecFact

FLOOR_POLL_S_MIN = 0.01
FLOOR_POLL_S_MAX = 0.1


class LogBehind(Exception):
    """The log did not get to a position in time: the recorder is away, or far behind."""


class LogUnavailable(Exception):
    """The database is away. It may be back at the next attempt."""


class Position(NamedTuple):
    """Where the log stands: a sequence of the stream of an epoch."""

    epoch: int
    sequence: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The reverse of `str`.

        Raises:
            ValueError: it is no position.
        """
        epoch, colon, sequence = text.partition(":")
        if not (colon and epoch.isdecimal() and sequence.isdecimal()):
            raise ValueError(f"{text!r} is no position: it looks like 1:2345")
        return cls(int(epoch), int(sequence))

    def __str__(self) -> str:
        return f"{self.epoch}:{self.sequence}"


@dataclass(frozen=True, slots=True)
class SpecContent:
    """A registered spec. `content` is its canonical bytes; empty where `blob` says where they
    lie in the object store."""

    spec_hash: str
    kind: str
    content: bytes
    blob: str | None

    def value(self) -> dict[str, Any]:
        """`{"kind", "document", "files"}`, decoded from `content`."""
        result: dict[str, Any] = canonical.decode(self.content)
        return result


_COLUMNS = ", ".join(f'l."{name}"' for name in LogRow._fields)
_ROWS = f"select {_COLUMNS} from event_log l where l.session_id = $1 and l.session_at = $2"
_ORDER = ' order by l.epoch, l.sequence, l."index"'
_FLOOR = "select epoch, sequence from log_floor order by epoch desc limit 1"
_UP_TO = " and (l.epoch, l.sequence) <= (coalesce($4::int, f.epoch), $3::bigint)"


class LogReader:
    """Reads the log. Several queries may run at once, each on a connection of the pool."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    @classmethod
    async def connect(cls, database_url: str) -> Self:
        """A reader. Connections are made when they are needed."""
        return cls(Connections(database_url))

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def _fetch(self, query: str, *arguments: object) -> Sequence[Any]:
        try:
            return await self._connections.fetch(query, *arguments)
        except DatabaseAway as error:
            raise LogUnavailable(f"the log's database cannot be asked: {error}") from error

    async def _log_rows(self, query: str, *arguments: object) -> list[LogRow]:
        return list(map(LogRow._make, await self._fetch(query, *arguments)))

    # -- the floor -----------------------------------------------------------------------------

    async def floor(self) -> Position:
        """How far the log has the stream; (0, 0) before there is anything."""
        found = await self._fetch(_FLOOR)
        return Position(*found[0]) if found else Position(0, 0)

    async def wait_floor(
        self, sequence: int, timeout_s: float, *, epoch: int | None = None
    ) -> None:
        """Wait until the log has all of the stream up to a position.

        Args:
            sequence: of the stream.
            epoch: the epoch that `sequence` counts in. What an older one had is over, and a log
                that has come to a later one has all of it that it will ever have. None: the one
                that the log is in, which is a guess where the stream may be a new one: the log
                comes to its epoch only when the recorder does.

        Raises:
            LogBehind: it has not, after `timeout_s`.
        """
        state = "it has not been read"
        pause_s = FLOOR_POLL_S_MIN
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        floor = await self.floor()
                        if floor >= Position(floor.epoch if epoch is None else epoch, sequence):
                            return
                        state = f"it stands at {floor.sequence} of epoch {floor.epoch}"
                    except LogUnavailable as error:
                        state = str(error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, FLOOR_POLL_S_MAX)
        except TimeoutError:
            wanted = f"{sequence}" if epoch is None else f"{sequence} of epoch {epoch}"
            raise LogBehind(
                f"the log has not come to {wanted} within {timeout_s:.1f} s: {state}. "
                "Is the recorder running?"
            ) from None

    # -- rows ----------------------------------------------------------------------------------

    async def rows(
        self, session_id: UUID, *, upto: int | None = None, epoch: int | None = None
    ) -> list[LogRow]:
        """All rows of a session, in the order of the log.

        Args:
            upto: a sequence of the stream; later rows are left out.
            epoch: the epoch that `upto` counts in; None: the one that the log is in.
        """
        at = keys.session_time(session_id)
        if upto is None:
            return await self._log_rows(_ROWS + _ORDER, session_id, at)
        query = _ROWS.replace(" where", f" cross join ({_FLOOR}) f where") + _UP_TO + _ORDER
        return await self._log_rows(query, session_id, at, upto, epoch)

    async def said_rows(self, session_id: UUID) -> list[LogRow]:
        """What an agent said beside its actions and what it is held against: the request, the steps
        with extras, the tool calls, the rewards; observations left out. Nothing where the agent
        said nothing and called nothing, as most do: that costs one look at the session."""
        query = _ROWS.replace('l."observation"', "null::bytea").replace(
            'l."reset_observation"', "null::bytea"
        )
        said = "(l.kind = 'session.stepped' and l.extras is not null or l.kind = 'tool.called')"
        return await self._log_rows(
            f"{query} and ({said} or l.kind in ('reward.scored', 'session.requested'))"
            f" and exists ({_ROWS} and {said}){_ORDER}",
            session_id,
            keys.session_time(session_id),
        )

    async def row(self, session_id: UUID, key: str) -> LogRow | None:
        """The row under a natural key."""
        query = _ROWS + " and l.key = $3"
        found = await self._log_rows(query, session_id, keys.session_time(session_id), key)
        return found[0] if found else None

    async def keyed(self, session_id: UUID, named: Sequence[str]) -> list[LogRow]:
        """The rows under some natural keys, in the order of the log; those that are there."""
        query = _ROWS + " and l.key = any($3::text[])" + _ORDER
        at = keys.session_time(session_id)
        return await self._log_rows(query, session_id, at, list(named))

    async def last_step(self, session_id: UUID) -> int | None:
        """The highest step that is logged."""
        found = await self._fetch(
            "select max(step) from event_log where session_id = $1 and session_at = $2"
            " and key >= 'step:' and key < 'step;'",
            session_id,
            keys.session_time(session_id),
        )
        step: int | None = found[0][0]
        return step

    # -- specs ---------------------------------------------------------------------------------

    async def spec(self, spec_hash: str) -> SpecContent | None:
        """A registered spec; None if it is not known."""
        found = await self.row(SYSTEM_SESSION, keys.spec(spec_hash))
        if found is None:
            return None
        # Bytes are base64 in a fact, as in JSON, and only JSON validation turns them back.
        fact = SpecFact.model_validate_json(json.dumps(canonical.decode(found.fact)))
        return SpecContent(fact.spec_hash, fact.kind, fact.content, fact.blob)

    async def service_declarations(self) -> list[LogRow]:
        """The rows of all declarations of outside services, in the order of the log."""
        query = _ROWS + " and l.key >= 'service:' and l.key < 'service;'" + _ORDER
        return await self._log_rows(query, SYSTEM_SESSION, keys.session_time(SYSTEM_SESSION))

    async def known_specs(self) -> dict[str, str]:
        """Hash to kind of every registered spec."""
        found = await self._fetch(
            "select substr(key, 6), fact_json->>'kind' from event_log"
            " where session_id = $1 and session_at = $2 and key >= 'spec:' and key < 'spec;'",
            SYSTEM_SESSION,
            keys.session_time(SYSTEM_SESSION),
        )
        return dict([tuple(record) for record in found])
