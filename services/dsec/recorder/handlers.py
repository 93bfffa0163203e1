"""What becomes of a batch: rows, parked messages and dead letters, then the acknowledgement.

A batch that the database refuses for its data is tried again a few times, then the rows at fault
are found by halving and put aside as dead letters, and the rest go on. Dead letters are published
before the rest is committed: should we die between the two, they are published twice, not never.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

import numpy as np
import psycopg
import pyarrow as pa
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from dsec.platform.bus import Bus, Message
from dsec.platform.telemetry import OFF, Telemetry
from dsec.recorder.counters import Counters
from dsec.recorder.effects import Item, dead_letter, message_of_parked
from dsec.recorder.intake import UNFIT, Reading, Unfit, alone, read, table_of
from dsec.recorder.rows import EPOCH_START, Parked
from dsec.recorder.settings import RecorderSettings
from dsec.recorder.traces import committed_items
from dsec.recorder.writer import Aside, Commit, RowsRefused, Writer
from dsec_contracts import SYSTEM_SESSION
from dsec_contracts.catalog import BY_TYPE
from dsec_contracts.keys import SESSION_AGE_MAX, SESSION_AHEAD_MAX, session_time

log = logging.getLogger(__name__)

UNPARK_MESSAGES_MAX = 256
PARTITION_AHEAD = timedelta(days=31)
PARTITION_CHECK_S = 3600.0
_NO_PLACE = (
    f"the time in its session id is over {SESSION_AGE_MAX.days} days ago or over "
    f"{SESSION_AHEAD_MAX.days} day ahead, and a hypertable would make a chunk for it: make ids "
    "with a clock that is right (uuid7)"
)

Readings = dict[int, tuple[Message, Reading]]
"""Messages and what they turned out to be, by their sequence."""


@dataclass(slots=True)
class Appender:
    """Appends batches, for as long as this recorder is the one that writes."""

    writer: Writer
    bus: Bus
    epoch: int
    settings: RecorderSettings
    now: Callable[[], datetime]
    counters: Counters
    telemetry: Telemetry = OFF
    _months: set[int] = field(default_factory=set)
    _closed_months: set[int] = field(default_factory=set)
    """Of which a hypertable takes no rows."""

    async def on_batch(self, items: Sequence[Item]) -> None:
        """Append a batch and acknowledge it.

        Raises:
            psycopg.Error: the database is away; nothing of the batch is acknowledged.
        """
        last = items[-1].message
        await self._append(
            {item.message.sequence: (item.message, item.reading) for item in items},
            lambda table, parked: Commit(self.epoch, table, parked, last.sequence, last.time),
        )
        self.counters.batches += 1
        self.counters.messages += len(items)
        committed = self.now()
        self.counters.lag_s = max(0.0, (committed - last.time).total_seconds())
        committed_items(self.telemetry, items, committed)
        await last.ack()

    async def unpark(self) -> None:
        """Append the parked messages whose types this version knows."""
        while found := await self.writer.parked(list(BY_TYPE), UNPARK_MESSAGES_MAX):
            epoch = found[0][0]
            readings: Readings = {}
            for _, parked in (pair for pair in found if pair[0] == epoch):
                message = message_of_parked(
                    parked.sequence, parked.subject, json.loads(parked.headers_json), parked.body
                )
                readings[parked.sequence] = message, read(message, epoch)
            done = list(readings)
            await self._append(readings, partial(_unparked, epoch, done))
            log.info("%d parked messages are in the log now", len(done))

    async def keep_partitions(self) -> None:
        """Make this month's and the next one's, so that no batch has to, and drop old ones."""
        for time in (self.now(), self.now() + PARTITION_AHEAD):
            await self.writer.ensure_partition(time, self.settings.partitions_max)
        await self._drop_old()

    # -- one batch -----------------------------------------------------------------------------

    async def _append(
        self,
        readings: Readings,
        commit: Callable[[pa.Table, Sequence[Parked]], Commit],
    ) -> None:
        try:
            table = table_of([r for _, r in readings.values()])
        except UNFIT as error:
            log.error("%d messages make no table, trying each alone: %s", len(readings), error)
            readings = {n: (message, alone(r)) for n, (message, r) in readings.items()}
            table = table_of([r for _, r in readings.values()])
        for message, reading in readings.values():
            if isinstance(reading, Unfit):
                await self._give_up(message, reading.error)
        parked = [r for _, r in readings.values() if isinstance(r, Parked)]
        for p in parked:
            log.warning("event type %s is not known yet; parked at %d", p.event_type, p.sequence)
        table = await self._give_up_rows(readings, table, await self._without_place(table))
        try:
            aside = await self._attempts(commit(table, parked))
        except RowsRefused as error:
            bad = await self.writer.refused_rows(table)
            if not bad:
                raise  # refused together and not one by one: no row to blame, so none is given up
            log.error("%d rows are refused: %s", len(bad), error)
            table = await self._give_up_rows(readings, table, bad)
            aside = await self.writer.append(commit(table, parked))
        self.counters.rows += table.num_rows
        self.counters.parked += len(parked)
        self._report(aside)

    async def _attempts(self, commit: Commit) -> list[Aside]:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(RowsRefused),
            stop=stop_after_attempt(self.settings.data_attempts_max),
            wait=wait_exponential(multiplier=self.settings.data_retry_wait_s),
            sleep=asyncio.sleep,
            reraise=True,
        )
        aside: list[Aside] = await retrying(self.writer.append, commit)
        return aside

    async def _give_up(self, message: Message, error: str) -> None:
        await dead_letter(self.bus, message, error)
        self.counters.dead_letters += 1

    async def _give_up_rows(
        self, readings: Readings, table: pa.Table, bad: dict[int, str]
    ) -> pa.Table:
        """Make dead letters of rows; the others are returned."""
        if not bad:
            return table
        errors: dict[int, list[str]] = {}
        sequences, indices = table["sequence"].to_pylist(), table["index"].to_pylist()
        for row, error in sorted(bad.items()):
            errors.setdefault(sequences[row], []).append(f"row {indices[row]}: {error}")
        for sequence, lines in errors.items():
            await self._give_up(readings[sequence][0], "; ".join(lines))
        keep = np.ones(table.num_rows, bool)
        keep[list(bad)] = False
        return table.filter(pa.array(keep))

    async def _without_place(self, table: pa.Table) -> dict[int, str]:
        """Make the partitions that a batch needs, before it needs them; say which rows get none.

        Only for times that a session can have: a clock that is decades off makes none. Such rows
        go to the default partition; a hypertable has none and would make a chunk for each.
        """
        if not table.num_rows:
            return {}
        months = table["session_at"].to_numpy().astype("datetime64[M]").astype(int)
        now = self.now()
        # Compared as numbers: an id that is none may carry a year that no date has.
        oldest, newest = map(_month_number, (now - SESSION_AGE_MAX, now + SESSION_AHEAD_MAX))
        for month in set(months.tolist()) - self._months:
            if oldest <= month <= newest:
                first_day = EPOCH_START.replace(year=1970 + month // 12, month=month % 12 + 1)
                await self.writer.ensure_partition(first_day, self.settings.partitions_max)
            elif month != _SYSTEM_MONTH and not await self.writer.has_default_partition():
                self._closed_months.add(month)
            self._months.add(month)
        if self._closed_months.isdisjoint(months):
            return {}
        closed = np.flatnonzero(np.isin(months, list(self._closed_months)))
        return {int(row): _NO_PLACE for row in closed}

    async def _drop_old(self) -> None:
        days = self.settings.retention_days
        if days is None:
            return
        try:
            dropped = await self.writer.drop_before(self.now() - timedelta(days=days))
        except psycopg.errors.LockNotAvailable:
            log.warning("a long query reads what is older than %d days: dropped later", days)
            return
        for name in dropped:
            log.info("%s is dropped: its sessions are older than %d days", name, days)

    def _report(self, aside: Sequence[Aside]) -> None:
        for row in aside:
            where = f"{row.session_id}/{row.key}"
            if row.verdict == "conflict":
                self.counters.conflicts += 1
                log.error("determinism violation: %s was logged before with another fact", where)
            else:
                self.counters.superseded += 1
                log.warning("superseded: %s was logged before with another fact", where)


def _unparked(epoch: int, done: list[int], table: pa.Table, _: Sequence[Parked]) -> Commit:
    return Commit(epoch, table, unparked=done)


def _month_number(time: datetime) -> int:
    """Months since January 1970."""
    return (time.year - 1970) * 12 + time.month - 1


_SYSTEM_MONTH = _month_number(session_time(SYSTEM_SESSION))
