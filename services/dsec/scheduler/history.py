"""What the scheduler reads from the log: where the log stands, and what it holds of sessions.

A scheduler that starts takes its state from the log up to the floor and from the stream after it.
Requests beyond `sessions_queued_max` wait in the log and are read from here in their order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine

from dsec.platform.connections import Connections
from dsec.platform.engine import async_engine
from dsec.platform.log import LogReader, Position
from dsec.scheduler import queries
from dsec.scheduler.admission import Prior, digest_of
from dsec.scheduler.episodes import (
    CHANGES,
    ENDED,
    ENDS_MAX,
    EPISODES,
    STEPS,
    Ended,
    parameters,
    portion,
    sessions,
)
from dsec.scheduler.portions import Portion, Unread
from dsec_contracts import keys
from dsec_contracts.canonical import decode
from dsec_contracts.curriculum import CurriculumChanged
from dsec_contracts.envelope import Event
from dsec_contracts.service import ServiceDeclared, ServiceFact
from dsec_contracts.session import (
    CancelCode,
    RequestFact,
    SessionCancelRequested,
    SessionEnded,
    SessionPlaced,
    SessionReleased,
    SessionRequested,
)
from dsec_contracts.spec import PolicyPublished, SpecCircumstance, SpecRegistered
from dsec_contracts.worker import WorkerFenced

CONNECTIONS_MAX = 4
ROWS_AT_ONCE_MAX = 256
EPOCH_BITS = 44
"""A stream has fewer than 2**44 messages: an older epoch's positions lie that far below."""

_EVENTS: dict[str, type[Event]] = {
    event.event_name(): event
    for event in (
        SessionRequested,
        SessionCancelRequested,
        SessionPlaced,
        SessionReleased,
        SessionEnded,
        CurriculumChanged,
        WorkerFenced,
    )
}
_SYSTEM = {"system": keys.SYSTEM_SESSION, "system_at": keys.session_time(keys.SYSTEM_SESSION)}


@dataclass(frozen=True, slots=True)
class FloorRow:
    """The floor, the stream that its epoch counts in, and the time of the message at the floor."""

    floor: Position
    stream_created: datetime
    message_time: datetime | None


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request that the log holds and that nothing came of yet."""

    event_id: str
    at: Position
    request: RequestFact
    cancel: CancelCode | None


@dataclass(frozen=True, slots=True)
class SessionTail:
    """How far a session got: its last chain (None: it never started), steps, finished episodes."""

    chain: bytes | None
    steps: int
    episodes: int


class LogGap(Exception):
    """The log lacks a step of a session: it must not be folded."""


def flat(at: Position, epoch: int) -> int:
    """A position as one integer, from the viewpoint of `epoch`: older epochs are negative."""
    return at.sequence - ((epoch - at.epoch) << EPOCH_BITS)


class History:
    """The queries. All read committed rows only; those that fold stop at a floor."""

    def __init__(self, engine: AsyncEngine, log: LogReader) -> None:
        self._engine = engine
        self._log = log

    @classmethod
    def connect(cls, database_url: str) -> Self:
        """Queries on connections of their own, opened as they are needed."""
        log = LogReader(Connections(database_url, connections_max=1))  # which asks for the floor
        return cls(async_engine(database_url, connections_max=CONNECTIONS_MAX), log)

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.dispose()
        await self._log.close()

    async def _rows(self, query: Any, parameters: dict[str, Any]) -> list[Any]:
        async with self._engine.connect() as connection:
            return list((await connection.execute(query, parameters)).all())

    async def floor(self) -> FloorRow | None:
        """The floor; None where nothing was ever recorded."""
        rows = await self._rows(queries.FLOOR, {})
        return FloorRow(Position(*rows[0][:2]), *rows[0][2:]) if rows else None

    async def wait_floor(self, at: Position, timeout_s: float) -> None:
        """Wait until the log has passed a position.

        Raises:
            LogBehind: it has not, after `timeout_s`.
        """
        await self._log.wait_floor(at.sequence, timeout_s, epoch=at.epoch)

    async def parked(self) -> bool:
        """Whether messages that the state is made of are not in the log yet, though their types are
        known: a recorder that did not know them put them aside, and one of this version has not
        led since."""
        kinds: list[type[Event]] = [
            *_EVENTS.values(),
            SpecRegistered,
            PolicyPublished,
            ServiceDeclared,
        ]
        types = [kind.event_type() for kind in kinds]
        return bool(await self._rows(queries.PARKED, {"types": types}))

    async def specs(self) -> dict[str, tuple[str, SpecCircumstance]]:
        """Spec hash to kind and what is told beside it."""
        found = await self._rows(queries.SPECS, {})
        return {
            spec_hash: (
                kind,
                SpecCircumstance(services=services or [], per_episode=bool(per_episode)),
            )
            for spec_hash, kind, services, per_episode in found
        }

    async def services(self) -> list[ServiceFact]:
        """Every declaration of a service."""
        found = await self._rows(queries.SERVICES, {})
        return [ServiceFact.model_validate(decode(row[0])) for row in found]

    async def policies(self) -> set[str]:
        """`name@version` of every published policy."""
        found = await self._rows(queries.POLICIES, {})
        return {row[0].removeprefix("policy:").replace(".", "@", 1) for row in found}

    async def placed(self, floor: Position) -> AsyncIterator[tuple[Position, Event, datetime]]:
        """What was said of sessions that were placed and have not ended, and of fenced workers,
        in the order of the stream, up to `floor`; and when."""
        parameters = {"epoch": floor.epoch, "sequence": floor.sequence}
        rows = await self._rows(queries.PLACED, parameters) + await self._rows(
            queries.FENCES, parameters
        )
        rows.sort(key=lambda row: (row[1], row[2]))
        for number, (kind, epoch, sequence, fact, circumstance, time) in enumerate(rows):
            if number % ROWS_AT_ONCE_MAX == 0:
                await asyncio.sleep(0)  # a lease has to be renewed meanwhile
            yield Position(epoch, sequence), _event(kind, fact, circumstance), time

    async def ended_since(
        self, after: int, floor: Position, sessions_max: int
    ) -> list[tuple[Position, Event, datetime]]:
        """The placements, releases and ends of the sessions that ended behind `after` and not
        behind `floor`, in the order of the stream; of more than `sessions_max` the latest."""
        parameters = {
            "epoch": floor.epoch,
            "after": after,
            "sequence": floor.sequence,
            "limit": sessions_max,
        }
        return [
            (Position(epoch, sequence), _event(kind, fact, circumstance), time)
            for kind, epoch, sequence, fact, circumstance, time in await self._rows(
                queries.ENDED_SINCE, parameters
            )
        ]

    async def waiting(self, start: Position, floor: Position, limit: int) -> list[LoggedRequest]:
        """Requests from `start` to `floor` that were neither placed, ended nor rejected."""
        parameters = {
            "from_epoch": start.epoch,
            "from_sequence": start.sequence,
            "epoch": floor.epoch,
            "sequence": floor.sequence,
            "limit": limit,
        }
        rows = await self._rows(queries.WAITING, parameters | _SYSTEM)
        return [
            LoggedRequest(
                event_id,
                Position(epoch, sequence),
                RequestFact.model_validate(decode(fact)),
                _cancel_code(code),
            )
            for event_id, epoch, sequence, fact, code in rows
        ]

    async def episodes(self, unread: list[Unread], epoch: int) -> list[Portion]:
        """What the log has of these steps and their rewards, by session and episode; positions from
        the viewpoint of `epoch`."""
        found = []
        for row in await self._rows(EPISODES, parameters(unread)):
            *_, its_epoch, sequence, index, _ = row
            at = None
            if sequence is not None:
                at = flat(Position(its_epoch, sequence), epoch), index
            found.append(portion(row, at))
        return found

    async def ended_learners(self, epoch: int, sessions_max: int) -> list[Ended]:
        """The sessions with a curriculum that ended last, the newest ends first; of `ENDS_MAX`
        sessions that ended."""
        bounds = {"ends": ENDS_MAX, "sessions": sessions_max}
        return [
            Ended(session_id, (flat(Position(its_epoch, sequence), epoch), index), *told)
            for session_id, its_epoch, sequence, index, *told in await self._rows(ENDED, bounds)
        ]

    async def steps_of(self, session_ids: list[UUID]) -> dict[UUID, int]:
        """How many steps the log has of each."""
        return dict(map(tuple, await self._rows(STEPS, sessions(session_ids))))

    async def changes_of(self, session_ids: list[UUID]) -> dict[UUID, dict[int, int]]:
        """The levels that each was given, by the numbers of the changes."""
        found: dict[UUID, dict[int, int]] = {}
        for session_id, n, level in await self._rows(CHANGES, sessions(session_ids)):
            found.setdefault(session_id, {})[n] = level
        return found

    async def prior(self, asked: dict[UUID, Position]) -> dict[UUID, Prior]:
        """What the log knows of ids that are asked for, each at a position of the stream."""
        times = [keys.session_time(session_id) for session_id in asked]
        window = {"ids": list(asked), "earliest": min(times), "latest": max(times)}
        found: dict[UUID, Prior] = {}
        for session_id, key, epoch, sequence, fact, code, refused in await self._rows(
            queries.PRIOR, window | _SYSTEM
        ):
            known = found.get(session_id, Prior(None, False))
            if key == keys.CANCEL_REQUESTED:
                found[session_id] = Prior(known.facts, known.refused, _cancel_code(code or "?"))
            else:
                earlier = Position(epoch, sequence) < asked[session_id]
                facts = digest_of(fact) if earlier else None
                found[session_id] = Prior(facts, refused, known.cancel)
        return found

    async def tail(self, session_id: UUID) -> SessionTail:
        """How far a session got.

        Raises:
            LogGap: a step is missing.
        """
        at = keys.session_time(session_id)
        rows = await self._rows(queries.TAIL, {"id": session_id, "at": at})
        started, last, rows_found, steps, episodes = rows[0]
        if rows_found != steps:
            raise LogGap(f"session {session_id} has {rows_found} step rows of {steps} steps")
        return SessionTail(last if steps else started, steps, episodes)


def _event(kind: str, fact: bytes, circumstance: str | None) -> Event:
    value = {"fact": decode(fact), "circumstance": json.loads(circumstance or "{}")}
    return _EVENTS[kind].model_validate(value)


def _cancel_code(code: str | None) -> CancelCode | None:
    if code is None:
        return None
    return "deadline" if code == "deadline" else "cancelled"
