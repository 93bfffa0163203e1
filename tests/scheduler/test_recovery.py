"""Where a scheduler goes on: at the log's floor, if that is one of the stream that there is."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from dsec.platform.bus import Message, StreamState
from dsec.platform.log import Position
from dsec.platform.telemetry import OFF
from dsec.scheduler.handlers import DeliveryLost, Scheduler
from dsec.scheduler.history import FloorRow
from dsec.scheduler.recovery import LogNotReady, recover, start_floor
from dsec.scheduler.settings import SchedulerConfig
from dsec.scheduler.state import SchedulerState
from dsec.scheduler.traces import Traces

CREATED = datetime(2026, 1, 1, tzinfo=UTC)
TIME = CREATED + timedelta(hours=1)
LATER = TIME + timedelta(microseconds=1)
ROW = FloorRow(Position(3, 70), CREATED, TIME)


def stream(first: int = 1, last: int = 90, created: datetime = CREATED) -> StreamState:
    return StreamState(first, last, last - first + 1, 1000, 1 << 30, created)


@pytest.mark.parametrize(
    ("row", "state", "at_floor", "expected"),
    [
        (None, stream(), None, Position(1, 0)),
        (ROW, stream(), TIME, Position(3, 70)),
        (ROW, stream(first=71), None, Position(3, 70)),  # the message at the floor is trimmed
        (FloorRow(Position(3, 0), CREATED, None), stream(), None, Position(3, 0)),
        # A new stream, one that lost its tail, and one that did and went on.
        (ROW, stream(created=LATER), TIME, Position(4, 0)),
        (ROW, stream(last=69), None, Position(4, 0)),
        (ROW, stream(), LATER, Position(4, 0)),
    ],
)
def test_the_floor_to_start_from(
    row: FloorRow | None, state: StreamState, at_floor: datetime | None, expected: Position
) -> None:
    assert start_floor(row, state, at_floor) == expected


def test_what_a_stream_has_lost_only_the_recorder_can_say() -> None:
    with pytest.raises(LogNotReady):
        start_floor(ROW, stream(first=5), LATER)


async def test_a_first_delivery_of_what_was_seen_is_no_repetition() -> None:
    unused: Any = None
    config = SchedulerConfig()
    scheduler = Scheduler(
        unused, unused, config, unused, now=lambda: CREATED, monotonic=lambda: 0.0
    )
    scheduler._position = 10
    message = Message("dsec.x", {}, b"", 5, 1, TIME, unused, consumer_sequence=1)
    with pytest.raises(DeliveryLost, match="set back behind 10"):
        await scheduler._take([message])


@pytest.mark.nats
@pytest.mark.postgres
async def test_a_stream_that_was_set_back_is_read_from_its_beginning(world: Any) -> None:
    last = (await world.bus.stream_state()).last_sequence
    await world.until(lambda: world.sql("select 1 from log_floor where sequence >= %(n)s", n=last))
    recovered = await recover(world.bus, world.history, SchedulerState(), Traces(OFF, ()))
    assert recovered.floor == Position(1, last)

    def another_message() -> None:
        with psycopg.connect(world.database_url) as connection:
            connection.execute("update log_floor set message_time = message_time - interval '1 s'")

    await asyncio.to_thread(another_message)
    recovered = await recover(world.bus, world.history, SchedulerState(), Traces(OFF, ()))
    assert recovered.floor == Position(2, 0)
