"""The writer on a real PostgreSQL: exact values, one row a fact, and what is put aside."""

from __future__ import annotations

import math
import os
import struct
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from dsec.platform.bus import Message
from dsec.recorder.intake import read, table_of
from dsec.recorder.writer import Commit, Floor, RowsRefused, Writer
from dsec_contracts import Envelope, Event, subjects
from dsec_contracts.keys import session_time

pytestmark = pytest.mark.postgres
NOW = datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=UTC)


class Log:
    """A writer, and a view of what it wrote."""

    def __init__(self, writer: Writer, url: str) -> None:
        self.writer = writer
        self.url = url

    def table(self, events: list[tuple[int, Event]], epoch: int = 1) -> Any:
        raw: Any = None
        readings = []
        for sequence, event in events:
            headers = Envelope(str(uuid.uuid4()), event.event_type(), "test", NOW).headers()
            subject = subjects.subject(event.event_name(), "x")
            message = Message(subject, headers, event.body(), sequence, 1, NOW, raw)
            readings.append(read(message, epoch))
        return table_of(readings)

    async def append(self, *events: tuple[int, Event], epoch: int = 1) -> list[tuple[str, str]]:
        last = max(sequence for sequence, _ in events)
        commit = Commit(epoch, self.table(list(events), epoch), (), last, NOW)
        return sorted((a.key, a.verdict) for a in await self.writer.append(commit))

    def query(self, text: str, *arguments: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(text, arguments or None).fetchall()


SERVERS = [
    pytest.param("log_url", id="postgresql"),
    pytest.param("hypertable_log_url", id="timescaledb", marks=pytest.mark.timescaledb),
]


@pytest.fixture(params=SERVERS)
def any_log_url(request: pytest.FixtureRequest) -> str:
    """A migrated database, partitioned natively and as a hypertable."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
async def log(any_log_url: str) -> AsyncIterator[Log]:
    writer = await Writer.connect(any_log_url)
    await writer.start_epoch(Floor(1, NOW, 0, None))
    yield Log(writer, any_log_url)
    await writer.close()


async def test_values_arrive_bit_for_bit(log: Log, make: Any) -> None:
    sid = make.new_session()
    quiet = struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\x7f")[0]  # a NaN with a payload
    values = [float("nan"), quiet, -0.0, 0.0, math.inf, -math.inf, 1e16, 5e-324, 0.1]
    facts = [os.urandom(40) + b"\0" for _ in values]
    steps = [0, 1, 2, 3, 4, 5, 6, 7, 2**31 - 1]
    big = os.urandom(100_000)
    event = make.stepped(
        [sid] * 9, steps, values, facts=facts, observations=[b"\0", b"", big, *[b""] * 6]
    )
    await log.append((2**40, event))
    await log.append((2**40 + 1, make.requested(sid, client='a\0b"\\')))
    with psycopg.connect(log.url) as connection:
        rows = connection.execute(
            "select step, float8send(value), fact, session_id, session_at, event_time, observation,"
            " sequence from event_log where kind = 'session.stepped' order by step"
        ).fetchall()
    assert [r[0] for r in rows] == steps
    assert [r[1] for r in rows] == [struct.pack(">d", v) for v in values]
    assert [r[2] for r in rows] == facts
    assert {r[3:6] for r in rows} == {(sid, session_time(sid), NOW)}
    assert [r[6] for r in rows[:4]] == [b"\0", None, big, None]
    assert {r[7] for r in rows} == {2**40}
    ((circumstance,),) = log.query("select circumstance from event_log where key = 'requested'")
    assert circumstance == {"client": 'a\0b"\\'}


async def test_duplicates_across_batches_and_within_one(log: Log, make: Any) -> None:
    sid = make.new_session()
    await log.append((1, make.stepped([sid] * 2, [0, 1])))
    again = make.stepped([sid] * 3, [0, 1, 2])
    assert await log.append((2, again), (3, again), (4, make.stepped([sid] * 2, [2, 3]))) == []
    found = log.query('select key, sequence, "index" from event_log order by key')
    assert found == [("step:0", 1, 0), ("step:1", 1, 1), ("step:2", 2, 2), ("step:3", 4, 1)]
    assert log.query("select count(*) from event_aside") == [(0,)]


async def test_other_facts_are_put_aside_once(log: Log, make: Any) -> None:
    sid = make.new_session()
    await log.append((1, make.stepped([sid], [0], [1.0])), (2, make.scored([sid], [0], [1.0])))
    await log.append((3, make.started(sid)), (4, make.ended(sid)))
    others = [
        (5, make.stepped([sid], [0], [2.0])),
        (6, make.scored([sid], [0], [2.0])),
        (7, make.started(sid, chain=b"\7" * 32)),
        (8, make.ended(sid, code="episodes_max")),
    ]
    expected = [
        ("ended", "superseded"),
        ("reward:0.1", "superseded"),
        ("started", "conflict"),
        ("step:0", "conflict"),
    ]
    assert await log.append(*others) == expected
    assert await log.append(*others) == []
    assert await log.append(*((n + 10, event) for n, event in others)) == []
    kept = log.query("select key, sequence, kept_sequence from event_aside order by key")
    assert kept == [("ended", 8, 4), ("reward:0.1", 6, 2), ("started", 7, 3), ("step:0", 5, 1)]
    assert log.query("select sequence from event_log order by sequence") == [(1,), (2,), (3,), (4,)]
    both = log.query("select a.fact <> l.fact from event_aside a join event_log l using (key)")
    assert both == [(True,)] * 4


async def test_of_two_facts_in_one_batch_the_lower_position_counts(log: Log, make: Any) -> None:
    sid = make.new_session()
    late, early = make.requested(sid, seed=2), make.requested(sid, seed=1)
    assert await log.append((9, late), (8, early)) == [("requested", "superseded")]
    assert log.query("select sequence from event_log") == [(8,)]
    assert log.query("select sequence, kept_sequence from event_aside") == [(9, 8)]


async def test_the_floor_moves_with_the_rows_and_never_back(log: Log, make: Any) -> None:
    sid = make.new_session()
    await log.append((5, make.stepped([sid], [0])))
    await log.append((3, make.stepped([sid], [1])))
    assert log.query("select epoch, sequence, message_time from log_floor") == [(1, 5, NOW)]
    with pytest.raises(RowsRefused, match="22021"):
        await log.append((6, make.stepped([sid] * 2, [2, 3], causes=[b"ok", b"\xff"])))
    assert log.query("select sequence from log_floor") == [(5,)]
    assert len(log.query("select 1 from event_log")) == 2


async def test_a_database_that_is_away_is_no_fault_of_the_rows(log: Log, make: Any) -> None:
    table = log.table([(1, make.stepped([make.new_session()], [0]))])
    log.query(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'dsec-recorder'"
        " and datname = current_database()"
    )
    with pytest.raises(psycopg.OperationalError):
        await log.writer.append(Commit(1, table, (), 1, NOW))
    with pytest.raises(psycopg.OperationalError):
        await log.writer.refused_rows(table)


async def test_refused_rows_are_found_by_halving_and_nothing_is_written(
    log: Log, make: Any
) -> None:
    sid = make.new_session()
    causes = [b"started"] * 100
    causes[17] = causes[18] = causes[99] = b"\xff"
    table = log.table([(1, make.stepped([sid] * 100, list(range(100)), causes=causes))])
    bad = await log.writer.refused_rows(table)
    assert sorted(bad) == [17, 18, 99]
    assert all(error.startswith("22021") for error in bad.values())
    assert log.query("select count(*) from event_log") == [(0,)]


async def test_a_key_too_long_for_the_index_is_the_rows_fault(log: Log, make: Any) -> None:
    table = log.table([(1, make.requested(make.new_session()))])
    long = table.set_column(
        table.schema.get_field_index("key"), table.schema.field("key"), [[os.urandom(3000).hex()]]
    )
    with pytest.raises(RowsRefused, match="54000"):
        await log.writer.append(Commit(1, long, (), 1, NOW))


@pytest.mark.parametrize("any_log_url", SERVERS[:1], indirect=True)
async def test_partitions_are_made_and_bounded_and_the_default_catches_the_rest(
    log: Log, make: Any
) -> None:
    partitions = "select count(*) from pg_inherits where inhparent = 'event_log'::regclass"
    ((before,),) = log.query(partitions)
    month = datetime(2031, 2, 3, tzinfo=UTC)
    inside = make.new_session(month)
    outside = make.new_session(datetime(2032, 2, 3, tzinfo=UTC))
    assert await log.writer.ensure_partition(month, before + 1)
    assert await log.writer.ensure_partition(month, before + 1)
    assert not await log.writer.ensure_partition(month + timedelta(days=60), before + 1)
    await log.append((1, make.stepped([inside], [0])), (2, make.stepped([outside], [0])))
    assert log.query("select tableoid::regclass::text from event_log order by sequence") == [
        ("event_log_203102",),
        ("event_log_default",),
    ]
    # Rows of the month lie in the default partition: there they stay, and stay unique.
    assert not await log.writer.ensure_partition(session_time(outside), 99)
    assert await log.append((3, make.stepped([outside], [0]))) == []
    assert log.query("select count(*) from event_log") == [(2,)]
    assert log.query(partitions) == [(before + 1,)]


async def test_only_one_connection_has_the_lock(log: Log) -> None:
    assert await log.writer.try_lock()
    other = await Writer.connect(log.url)
    assert not await other.try_lock()
    await log.writer.close()
    for _ in range(100):
        if await other.try_lock():
            break
    else:
        pytest.fail("the lock outlived its connection")
    await other.close()


@pytest.mark.parametrize("any_log_url", SERVERS[:1], indirect=True)
async def test_ids_that_are_no_session_ids_have_a_place(log: Log, make: Any) -> None:
    odd = [UUID(int=0), UUID(int=2**128 - 1)]
    await log.append((1, make.stepped(odd, [0, 0])))
    assert log.query("select tableoid::regclass::text, count(*) from event_log group by 1") == [
        ("event_log_default", 2)
    ]


@pytest.mark.timescaledb
@pytest.mark.parametrize("any_log_url", SERVERS[1:], indirect=True)
async def test_a_hypertable_makes_chunks_of_30_days_by_itself(log: Log, make: Any) -> None:
    monday = datetime(2026, 5, 4, tzinfo=UTC)
    sessions = [make.new_session(monday + timedelta(days=days)) for days in (0, 1, 40)]
    assert await log.writer.ensure_partition(monday, 1)
    assert not await log.writer.has_default_partition()
    await log.append((1, make.stepped(sessions, [0, 0, 0])))
    chunks = log.query("select range_end - range_start from event_log_ranges()")
    assert chunks == [(timedelta(days=30),)] * 2
    # Rows up to a page stay in the table, in every chunk.
    options = "select distinct reloptions from pg_class where relname like '\\_hyper%chunk'"
    assert log.query(options) == [(["toast_tuple_target=8160"],)]


@pytest.mark.timescaledb
@pytest.mark.parametrize("any_log_url", SERVERS[1:], indirect=True)
async def test_late_rows_are_never_too_many_for_compressed_chunks(log: Log) -> None:
    cursor = await log.writer._connection.execute(
        "select current_setting('timescaledb.max_tuples_decompressed_per_dml_transaction')"
    )
    assert await cursor.fetchone() == ("0",)
