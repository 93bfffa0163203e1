"""Trimming: the stream loses what everybody has, so that it never fills up with what is logged.

Nothing is purged above the log's own floor. Fences and dead letters stay, and so do the
placements of sessions that live: after a purge of a subject's last message the server forgets its
sequence, and healthy publishers would be refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any
from uuid import UUID

import psycopg

from dsec.platform.bus import Bus, ConsumerState, StreamState
from dsec.platform.cancellation import cancelled
from dsec.platform.roles import ROLES
from dsec.recorder.effects import StreamSetBack, check_floor
from dsec.recorder.settings import RecorderSettings
from dsec.recorder.writer import Floor
from dsec_contracts import EVENTS, SessionPlaced, subjects

log = logging.getLogger(__name__)

WAITED_FOR = (*(durable.name for role in ROLES for durable in role.durables), "lane-*")
"""The durable consumers whose floors hold the stream back."""

TRIMMED = [
    subject
    for subject in subjects.STREAM_SUBJECTS
    if not subject.startswith((subjects.FENCE, subjects.DEAD_LETTER, "dsec.session."))
] + [
    subjects.every(event.event_name())
    for event in EVENTS
    if event.event_name().startswith("session.") and event is not SessionPlaced
]

_ENDED = (
    "select session_id, sequence from event_log"
    " where step is null and kind = 'session.ended' and epoch = %s"
    " and sequence > %s and sequence <= %s order by sequence limit %s"
)
_FLOOR = (
    "select epoch, stream_created, sequence, message_time, placements_trimmed"
    " from log_floor where epoch = %s"
)
_SET_TRIMMED = "update log_floor set placements_trimmed = %s where epoch = %s"


@dataclass(frozen=True, slots=True)
class Horizon:
    """Up to where the stream may go, and who is no longer waited for."""

    sequence: int
    not_waited_for: tuple[str, ...]


def horizon(
    stream: StreamState, consumers: Iterable[ConsumerState], committed: int, hold_bytes_max: int
) -> Horizon:
    """The highest sequence that nobody needs any more. Pure.

    Args:
        stream: as it was before the consumers were looked at.
        committed: the log's floor.
    """
    mean_bytes = stream.bytes / stream.messages if stream.messages else 0.0
    lowest = min(committed, stream.last_sequence)
    left: list[str] = []
    for consumer in consumers:
        if not any(fnmatchcase(consumer.name, name) for name in WAITED_FOR):
            continue
        if consumer.pending == 0 and consumer.ack_pending == 0:
            continue  # has all there is for it, wherever its floor lies
        if (stream.last_sequence - consumer.floor) * mean_bytes > hold_bytes_max:
            left.append(consumer.name)
        else:
            lowest = min(lowest, consumer.floor)
    return Horizon(lowest, tuple(left))


@dataclass(slots=True)
class Trimmer:
    """Trims the stream, for as long as this recorder is the one that writes."""

    bus: Bus
    settings: RecorderSettings
    now: Callable[[], datetime]
    epoch: int
    committed: int
    _ends: deque[tuple[datetime, int]] = field(default_factory=deque)
    _trimmed: int = 0

    async def trim_for_ever(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Trim once a period.

        Raises:
            StreamSetBack: the stream no longer is the one that the log has.
            psycopg.Error: the database is away. The bus's errors likewise.
        """
        while not cancelled():
            await asyncio.sleep(self.settings.trim_period_s)
            await self.trim(connection)

    async def trim(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Purge what everybody has and is old enough."""
        committed = self.committed
        cursor = await connection.execute(_FLOOR, (self.epoch,))
        row = await cursor.fetchone()
        if row is None:
            return
        stream = await self.bus.stream_state()
        await self._check_stream(stream, Floor(*row[:4]))
        found = horizon(
            stream, await self.bus.consumers(), committed, self.settings.trim_hold_bytes_max
        )
        for name in found.not_waited_for:
            log.warning(
                "consumer %s holds back more than %d bytes of the stream; not waited for, "
                "it has to rebuild from the log",
                name,
                self.settings.trim_hold_bytes_max,
            )
        old = min(found.sequence, self.old_enough(stream.last_sequence))
        if old > self._trimmed:
            for subject in TRIMMED:
                await self.bus.purge(subject, old + 1)
            self._trimmed = old
        await self._trim_placements(connection, row[4], old)

    async def _check_stream(self, stream: StreamState, floor: Floor) -> None:
        # What is purged by its number has to be what was logged under that number.
        if stream.created != floor.stream_created or stream.last_sequence < floor.sequence:
            raise StreamSetBack(f"the stream ends at {stream.last_sequence}, before the floor")
        await check_floor(self.bus, floor)

    def old_enough(self, last_sequence: int) -> int:
        """Where the stream ended `trim_keep_s` ago, as far as is known."""
        now = self.now()
        self._ends.append((now, last_sequence))
        limit = now - timedelta(seconds=self.settings.trim_keep_s)
        found = 0
        while self._ends and self._ends[0][0] <= limit:
            found = self._ends.popleft()[1]
        if found:
            self._ends.appendleft((limit, found))
        return found

    async def _trim_placements(
        self, connection: psycopg.AsyncConnection[Any], done: int, old: int
    ) -> None:
        epoch = self.epoch
        cursor = await connection.execute(
            _ENDED, (epoch, done, old, self.settings.trim_placements_max)
        )
        ended: list[tuple[UUID, int]] = await cursor.fetchall()
        for session_id, sequence in ended:
            # Up to its end alone: whatever was placed later under this id is not ours to judge.
            await self.bus.purge(
                subjects.subject(SessionPlaced.event_name(), session_id), sequence + 1
            )
        if ended:
            await connection.execute(_SET_TRIMMED, (ended[-1][1], epoch))
