"""Recovery: the state that a scheduler starts with, from the log up to the floor.

What comes after the floor is in the stream, so that a scheduler that takes over at any moment has
the state of the one before it. Requests that wait are not read here: like all that are beyond the
queue's bound, they are taken from the log as there is room (`overflow` says from where).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.exc import SQLAlchemyError
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
)

from dsec.platform.bus import Bus, StreamState
from dsec.platform.cancellation import cancelled
from dsec.platform.log import Position
from dsec.scheduler.fold import evolve
from dsec.scheduler.history import FloorRow, History, flat
from dsec.scheduler.state import SchedulerState
from dsec.scheduler.traces import Traces

log = logging.getLogger(__name__)

LOG_WAIT_S_MAX = 600.0
LOG_POLL_S_MIN = 0.05
LOG_POLL_S_MAX = 2.0
PARKED_POLL_S = 2.0
ENDED_MEANWHILE_MAX = 10_000
"""Sessions that ended while no scheduler led, and whose traces are sent late."""


class LogNotReady(Exception):
    """The log does not say yet where the stream goes on."""


LOG_AWAY = (SQLAlchemyError, OSError, LogNotReady)
"""How it shows that the log cannot be read now."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where the state ends in the stream, and from where requests wait in the log.

    `incomplete`: the log lacks messages up to the floor that a recorder has put aside, and will get
    them from a recorder of this version.
    """

    floor: Position
    overflow: Position | None
    incomplete: bool = False


def patiently() -> AsyncRetrying:
    """Retries reads of the log while it is away, up to `LOG_WAIT_S_MAX`."""
    return AsyncRetrying(
        stop=stop_after_delay(LOG_WAIT_S_MAX),
        wait=wait_exponential(multiplier=LOG_POLL_S_MIN, max=LOG_POLL_S_MAX),
        retry=retry_if_exception_type(LOG_AWAY),
        reraise=True,
    )


def start_floor(row: FloorRow | None, stream: StreamState, at_floor: datetime | None) -> Position:
    """Where in the stream a scheduler goes on.

    Args:
        at_floor: the time of the stream's message at the floor. None: there is none, which says
            nothing, as the recorder trims what is logged.

    Raises:
        LogNotReady: the floor is one of another stream, and this one has lost its beginning: only
            the recorder can say.
    """
    if (
        row is not None
        and row.stream_created == stream.created
        and row.floor.sequence <= stream.last_sequence
        and (at_floor is None or row.message_time is None or at_floor == row.message_time)
    ):
        return row.floor
    if stream.first_sequence > 1:
        raise LogNotReady("the log's floor is not one of this stream: is the recorder running?")
    # Nothing of this stream is logged yet, and all of it is there: its epoch is the next one.
    return Position(row.floor.epoch + 1 if row is not None else 1, 0)


async def _start_floor(bus: Bus, row: FloorRow | None) -> Position:
    at_floor = await bus.message_time(row.floor.sequence) if row and row.floor.sequence else None
    return start_floor(row, await bus.stream_state(), at_floor)


async def _ended_meanwhile(
    history: History, floor: Position, told_until: int, traces: Traces
) -> None:
    """Have the traces sent of sessions that ended while no scheduler led; the state needs none."""
    if told_until < floor.sequence:
        for at, event, time in await history.ended_since(told_until, floor, ENDED_MEANWHILE_MAX):
            traces.take(event, time, flat(at, floor.epoch))


async def recover(bus: Bus, history: History, state: SchedulerState, traces: Traces) -> Recovered:
    """Fill `state` and `traces` from the log.

    Raises:
        LogNotReady, SQLAlchemyError, OSError: the log could not be read for `LOG_WAIT_S_MAX`.
    """
    floor, incomplete = Position(0, 0), False
    async for attempt in patiently():
        with attempt:
            incomplete = await history.parked()  # before anything is read, or one would be missed
            row = await history.floor()
            floor = await _start_floor(bus, row)
            if row is None:
                return Recovered(floor, None)
    for spec_hash, (kind, told) in (await history.specs()).items():
        state.registered(spec_hash, kind, told)
    for service in await history.services():
        state.declared(service.name, service.version, service.qps_budget)
    state.policies.update(await history.policies())
    told_until = traces.start(floor.sequence)
    async for at, event, time in history.placed(floor):
        evolve(state, event, flat(at, floor.epoch))
        traces.take(event, time, flat(at, floor.epoch))
    await _ended_meanwhile(history, floor, told_until, traces)
    log.info(
        "from the log up to %d.%d: %d placed sessions, %d specs, %d policies",
        floor.epoch,
        floor.sequence,
        len(state.sessions),
        len(state.specs),
        len(state.policies),
    )
    return Recovered(floor, Position(0, 0), incomplete)


async def until_complete(history: History) -> None:
    """Wait until the log has what a recorder of an earlier version had put aside."""
    while not cancelled():
        await asyncio.sleep(PARKED_POLL_S)
        with contextlib.suppress(*LOG_AWAY):  # it is asked again
            if not await history.parked():
                return
