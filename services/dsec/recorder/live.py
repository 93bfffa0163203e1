"""`session_live`: what runs now, from heartbeats. A view of the present, never folded.

Every recorder hears heartbeats, the one that writes the log writes them down, at most once per
`heartbeat_write_s`, the latest of each session.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from pydantic import ValidationError

from dsec.platform.bus import Bus
from dsec.platform.cancellation import cancelled
from dsec.recorder.settings import RecorderSettings
from dsec_contracts import Envelope, EnvelopeError, WorkerHeartbeat, subjects

log = logging.getLogger(__name__)

_UPSERT = """
insert into session_live (session_id, attempt, worker, step, waiting_on, heartbeat_at)
select r.* from json_to_recordset(%s::json) as r(
    session_id uuid, attempt int, worker text, step int, waiting_on text, heartbeat_at timestamptz)
order by 1
on conflict (session_id) do update set
    attempt = excluded.attempt, worker = excluded.worker, step = excluded.step,
    waiting_on = excluded.waiting_on, heartbeat_at = excluded.heartbeat_at
where (excluded.attempt, excluded.heartbeat_at)
    > (session_live.attempt, session_live.heartbeat_at)
"""
_FORGET = "delete from session_live where heartbeat_at < %s"

_FIELDS = ("session_id", "attempt", "worker", "step", "waiting_on", "heartbeat_at")
Row = tuple[int, str, int, str, datetime]


class Live:
    """Heartbeats heard and not yet written down."""

    def __init__(self, settings: RecorderSettings, now: Callable[[], datetime]) -> None:
        self._settings = settings
        self._now = now
        self._rows: dict[UUID, Row] = {}

    async def listen(self, bus: Bus) -> None:
        """Hear heartbeats for as long as the bus is connected."""
        await bus.listen(subjects.every(WorkerHeartbeat.event_name()), self.on_worker_heartbeat)

    async def on_worker_heartbeat(self, headers: Mapping[str, str], data: bytes) -> None:
        """Keep the latest of each session. A malformed heartbeat is passed over: another comes."""
        try:
            time = Envelope.parse(headers).time
            beat = WorkerHeartbeat.model_validate_json(data)
            state = beat.circumstance
            columns = (state.sessions, state.attempts, state.steps, state.waiting_on)
            rows = list(zip(*columns, strict=True))
        except (EnvelopeError, ValidationError, ValueError) as error:
            log.warning("a heartbeat is malformed: %s", error)
            return
        for session_id, attempt, step, waiting_on in rows:
            row = (attempt, beat.fact.worker, step, waiting_on.replace("\0", ""), time)
            known = self._rows.get(session_id)
            if known is None and len(self._rows) >= self._settings.live_sessions_max:
                continue
            if known is None or (known[0], known[4]) < (attempt, time):
                self._rows[session_id] = row

    async def write_for_ever(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Write what was heard, once a period.

        Raises:
            psycopg.Error: the database is away.
        """
        while not cancelled():
            await asyncio.sleep(self._settings.heartbeat_write_s)
            await self._write(connection)

    async def _write(self, connection: psycopg.AsyncConnection[Any]) -> None:
        rows, self._rows = self._rows, {}
        if rows:
            # One parameter for all: lists of values are written out one value at a time, which
            # was a tenth of what the recorder did.
            given = [dict(zip(_FIELDS, (key, *row), strict=True)) for key, row in rows.items()]
            await connection.execute(_UPSERT, (json.dumps(given, default=str),))
        oldest = self._now() - timedelta(seconds=self._settings.live_keep_s)
        await connection.execute(_FORGET, (oldest,))
