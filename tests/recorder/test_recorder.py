"""The recorder on a real bus and a real database: nothing lost, nothing doubled, in order."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dsec.platform.bus import StreamOptions
from dsec.platform.clock import utc_now
from dsec.platform.migrations import migrate
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.postgres import PostgresOptions, prepare_postgres
from dsec.platform.stack.process import ChildProcess
from dsec.recorder import effects, intake
from dsec.recorder.trim import Trimmer
from dsec.recorder.writer import Floor
from dsec_contracts import SYSTEM_SESSION, Envelope, SpecRegistered, WorkerHeartbeat
from dsec_contracts.spec import SpecFact
from dsec_contracts.worker import HeartbeatCircumstance, HeartbeatFact

pytestmark = [pytest.mark.postgres, pytest.mark.nats]

DATABASE_AWAY_S = 20.0


async def dead_letters(rig: Any) -> list[Any]:
    consumer = await rig.bus.consumer(f"look-{uuid.uuid4().hex}", ["dsec.dead.>"], ack="none")
    count, found = (await consumer.state()).pending, list[Any]()
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await consumer.fetch(count - len(found), 0.5)
    return found


async def test_a_session_from_request_to_end(rig: Any, make: Any) -> None:
    sid = make.new_session()
    async with rig.recorder() as recorder:
        await rig.publish(make.requested(sid), sid)
        await rig.publish(make.placed(sid), sid, cause=f"{sid}/requested")
        await rig.publish(make.started(sid), sid, cause=f"{sid}/placed:1")
        await rig.publish(make.stepped([sid], [0], [float("nan")]), "l1")
        await rig.publish(make.scored([sid], [0], [-0.0]), "l1")
        last = await rig.publish(make.ended(sid, 1), sid, cause=f"{sid}/step:0")
        await rig.floor_at(last)
    assert rig.keys(sid) == ["requested", "placed:1", "started", "step:0", "reward:0.1", "ended"]
    causes = rig.query("select cause from event_log order by sequence")
    assert [c for (c,) in causes] == [
        None,
        "requested",
        "placed:1",
        "started",
        "step:0",
        "step:0",
    ]
    await rig.until(lambda: recorder.counters.rows == 6)  # counted just after the floor is visible
    state = next(c for c in await rig.bus.consumers() if c.name == "recorder")
    assert state.floor == last
    assert state.ack_pending == 0


async def test_the_same_event_again_after_the_duplicate_window_is_one_row(
    rig: Any, make: Any
) -> None:
    sid = make.new_session()
    async with rig.recorder() as recorder:
        for _ in range(2):  # every publish has a Nats-Msg-Id of its own
            await rig.publish(make.requested(sid), sid)
            last = await rig.publish(make.stepped([sid] * 2, [0, 1]), "l1")
            await rig.floor_at(last)
        # Another fact: for the request the first counts, for a step it is a violation.
        await rig.publish(make.requested(sid, seed=1), sid)
        last = await rig.publish(make.stepped([sid] * 2, [1, 2], [7.0, 7.0]), "l1")
        await rig.floor_at(last)
    assert rig.keys(sid) == ["requested", "step:0", "step:1", "step:2"]
    aside = rig.query("select key, verdict, sequence, kept_sequence from event_aside order by key")
    assert aside == [
        ("requested", "superseded", last - 1, 1),
        ("step:1", "conflict", last, 2),
    ]
    assert (recorder.counters.conflicts, recorder.counters.superseded) == (1, 1)


async def test_a_poisoned_message_among_a_hundred_good_ones(rig: Any, make: Any) -> None:
    sid = make.new_session()
    for n in range(50):
        await rig.publish(make.stepped([sid], [n]), "l1")
    # The row in the middle has a cause that is no UTF-8; its neighbours go on.
    bad = await rig.publish(
        make.stepped([sid] * 3, [50, 51, 52], causes=[b"started", b"\xff\xfe", b"a\0b"]), "l1"
    )
    headers = Envelope("x1", "session.ended.v1", "test", utc_now()).headers()
    malformed = [
        await rig.bus.publish_raw("dsec.session.ended.x", b"{not json", headers),
        await rig.bus.publish_raw("dsec.session.ended.x", b"{}", {**headers, "Nats-Msg-Id": "x2"}),
        await rig.bus.publish_raw("dsec.session.ended.x", b"{}", {"ce-id": "only"}),
        await rig.bus.publish_raw(
            "dsec.session.cancel_requested.x",
            json.dumps(
                {"fact": {"session_id": str(sid)}, "circumstance": {"reason": "\ud800"}}
            ).encode(),
            Envelope("x3", "session.cancel_requested.v1", "test", utc_now()).headers(),
        ),
    ]
    for n in range(53, 103):
        last = await rig.publish(make.stepped([sid], [n]), "l1")
    async with rig.recorder(data_retry_wait_s=0.01) as recorder:
        await rig.floor_at(last)
    assert rig.keys(sid) == [f"step:{n}" for n in range(103) if n not in (51, 52)]
    letters = await dead_letters(rig)
    assert sorted(int(m.headers["dead-sequence"]) for m in letters) == sorted([bad, *malformed])
    errors = {int(m.headers["dead-sequence"]): m.headers["dead-error"] for m in letters}
    assert "row 1: 22021" in errors[bad]
    assert "row 2: 22021" in errors[bad]
    assert letters[0].headers["dead-ce-type"].startswith("session.")
    await rig.until(
        lambda: recorder.counters.dead_letters == 5
    )  # counted just after the floor is visible


async def test_a_row_that_no_table_takes_is_a_dead_letter_and_the_rest_goes_on(
    rig: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = make.new_session(), make.new_session()
    cold = intake.cold_row

    def too_large(arrival: Any, epoch: int) -> dict[str, Any]:
        row: dict[str, Any] = cold(arrival, epoch)
        return row | {"step": 2**40} if row["session_id"] == bad.bytes else row

    monkeypatch.setattr(intake, "cold_row", too_large)
    for sid in (good, bad):
        await rig.publish(make.requested(sid), sid)
        last = await rig.publish(make.placed(sid), sid)
    async with rig.recorder() as recorder:
        await rig.floor_at(last)
        await rig.until(lambda: recorder.counters.dead_letters == 2)
    assert rig.keys(good) == ["requested", "placed:1"]
    assert rig.keys(bad) == []


async def test_the_database_goes_away_and_comes_back(
    nats_server: Any, make: Any, tmp_path: Path, rig: Any
) -> None:
    options = PostgresOptions(
        directory=tmp_path / "pg",
        log_path=tmp_path / "pg.log",
        port=free_port(),
        password="x",
        fast_unsafe_for_tests=True,
    )
    spec = await prepare_postgres(options)
    server = ChildProcess(spec)
    await server.wait_ready()
    rig.log_url = options.url
    try:
        await asyncio.to_thread(migrate, options.url)
        sid = make.new_session()
        async with rig.recorder(ack_wait_s=1.0) as recorder:
            last = await rig.publish(make.stepped([sid], [0]), "l1")
            await rig.floor_at(last)
            await server.stop()
            for n in range(1, 41):  # longer than ack_wait_s, so that the server delivers again
                last = await rig.publish(make.stepped([sid], [n]), "l1")
                await asyncio.sleep(DATABASE_AWAY_S / 40)
            server = ChildProcess(await prepare_postgres(options))
            await server.wait_ready()
            await rig.floor_at(last)
            assert rig.keys(sid) == [f"step:{n}" for n in range(41)]
            await rig.until(
                lambda: recorder.counters.dead_letters == 0
            )  # counted just after the floor is visible
            assert recorder.counters.leaderships >= 2
            assert rig.query("select count(*) from event_aside") == [(0,)]
    finally:
        await server.stop()


async def test_one_writes_and_the_other_takes_over(rig: Any, make: Any) -> None:
    sid = make.new_session()
    async with rig.recorder() as first:
        await rig.until(lambda: first.leading)
        async with rig.recorder() as second:
            last = await rig.publish(make.stepped([sid], [0]), "l1")
            await rig.floor_at(last)
            await asyncio.sleep(0.2)
            assert not second.leading
            # The writing connection dies under the first while events arrive.
            publishing = asyncio.create_task(publish_steps(rig, make, sid, 1, 60))
            await asyncio.sleep(0.05)
            rig.query(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'dsec-recorder'"
                " and pid in (select pid from pg_locks where locktype = 'advisory')"
            )
            await rig.floor_at(await publishing)
            # One that lost its connection finds out when it uses it.
            await rig.until(lambda: first.leading != second.leading)
            assert first.counters.leaderships + second.counters.leaderships >= 2
    assert rig.keys(sid) == [f"step:{n}" for n in range(60)]
    assert rig.query("select count(*) from event_aside") == [(0,)]


async def publish_steps(rig: Any, make: Any, sid: uuid.UUID, start: int, end: int) -> int:
    last = 0
    for n in range(start, end):
        last = await rig.publish(make.stepped([sid], [n]), "l1")
        await asyncio.sleep(0.005)
    return last


async def test_what_a_dead_recorder_held_is_not_acknowledged_over(rig: Any, make: Any) -> None:
    """The first batch was delivered to somebody who died: the next one begins at the floor, not
    with what the server would deliver next."""
    sid = make.new_session()
    last = await publish_steps(rig, make, sid, 0, 20)
    dead = await rig.bus.consumer(
        "recorder", effects.FILTERS, ack="all", ack_wait_s=60.0, max_ack_pending=4096
    )
    taken = 0
    async with asyncio.timeout(60):
        while taken < 10:
            taken += len(await dead.fetch(10 - taken, 1.0))
    async with rig.recorder():
        await rig.floor_at(last)
    assert rig.keys(sid) == [f"step:{n}" for n in range(20)]


async def test_a_lost_delivery_is_noticed(
    rig: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client drops a message of a slow consumer: it must not be acknowledged by a later one."""
    sid = make.new_session()
    dropped: list[int] = []
    fetch = effects.Feed._fetch

    async def lossy(feed: effects.Feed, count: int) -> Any:
        found = await fetch(feed, count)
        if len(found) > 2 and not dropped:
            dropped.append(found.pop(1).sequence)
        return found

    monkeypatch.setattr(effects.Feed, "_fetch", lossy)
    last = await publish_steps(rig, make, sid, 0, 20)
    async with rig.recorder():
        await rig.floor_at(last)
    assert dropped
    assert rig.keys(sid) == [f"step:{n}" for n in range(20)]


async def test_a_consumer_that_delivers_nothing_is_made_anew(
    rig: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sid = make.new_session()
    fetch = effects.Feed._fetch
    dead: list[effects.Feed] = []

    async def dead_at_first(feed: effects.Feed, count: int) -> Any:
        if not dead:
            dead.append(feed)
        if feed is dead[0]:
            await asyncio.sleep(0.05)
            return []
        return await fetch(feed, count)

    monkeypatch.setattr(effects.Feed, "_fetch", dead_at_first)
    last = await publish_steps(rig, make, sid, 0, 3)
    async with rig.recorder(stall_limit_s=0.3):
        await rig.floor_at(last)
    assert len(rig.keys(sid)) == 3


async def test_a_stream_that_ends_before_the_floor_is_noticed(rig: Any, make: Any) -> None:
    """Also while its consumer lives on, to which nothing would come until it has caught up."""
    last = await publish_steps(rig, make, make.new_session(), 0, 3)
    created = (await rig.bus.stream_state()).created
    floor = Floor(1, created, last + 100, None)
    feed = await effects.Feed.open(rig.bus, floor, rig.settings(stall_limit_s=0.2))
    with pytest.raises(effects.StreamSetBack, match=f"ends at {last}"):
        await asyncio.wait_for(feed._pump, 60)
    await feed.close()


async def test_what_is_held_and_delivered_again_is_not_written_twice(rig: Any, make: Any) -> None:
    sid = make.new_session()
    async with rig.recorder(ack_wait_s=0.3) as recorder:
        await rig.floor_at(await publish_steps(rig, make, sid, 0, 1))
        before = recorder.counters.leaderships  # more than one, where a connection took too long
        with psycopg.connect(rig.log_url) as blocker:
            blocker.execute("lock table event_log in access exclusive mode")
            last = await publish_steps(rig, make, sid, 1, 30)
            await asyncio.sleep(1)
        await rig.floor_at(last)
        await asyncio.sleep(0.5)
        await rig.until(
            lambda: recorder.counters.messages == 30
        )  # counted just after the floor is visible
        assert recorder.counters.leaderships == before
    assert rig.keys(sid) == [f"step:{n}" for n in range(30)]


async def test_partitions_are_made_for_plausible_times_alone(rig: Any, make: Any) -> None:
    now = utc_now()
    ids = [make.new_session(now.replace(year=year)) for year in (2020, now.year - 2, 2100)]
    ids.append(uuid.UUID(int=2**128 - 1))  # no session id at all; its year is 10889
    async with rig.recorder():
        last = await rig.publish(make.stepped(ids, [0, 0, 0, 0]), "l1")
        await rig.floor_at(last)
    places = rig.query('select tableoid::regclass::text from event_log order by "index"')
    assert places == [
        (f"event_log_2020{now:%m}",),
        (f"event_log_{now.year - 2}{now:%m}",),
        ("event_log_default",),
        ("event_log_default",),
    ]
    ahead = rig.query("select relname from pg_class where relname ~ '^event_log_[0-9]+$'")
    assert (f"event_log_{now + timedelta(days=31):%Y%m}",) in ahead


@pytest.mark.timescaledb
async def test_a_hypertable_gets_no_chunks_of_times_that_no_session_can_have(
    hypertable_rig: Any, make: Any
) -> None:
    rig = hypertable_rig
    # Events about no session have a fixed time, which one day is older than any session may be.
    now = utc_now().replace(year=2035)
    ids = [make.new_session(now.replace(year=year)) for year in (2100, 2035, 1999)]
    ids.append(uuid.UUID(int=2**128 - 1))
    spec = SpecFact(spec_hash=hashlib.sha256(b"x").hexdigest(), kind="agent", content=b"x")
    async with rig.recorder(lambda: now) as recorder:
        await rig.publish(make.stepped(ids, [0, 0, 0, 0]), "l1")
        last = await rig.publish(SpecRegistered(fact=spec), spec.spec_hash)
        await rig.floor_at(last)
        await rig.until(lambda: recorder.counters.rows == 2)
    assert {row[0] for row in rig.query("select session_id from event_log")} == {
        ids[1],
        SYSTEM_SESSION,
    }
    assert len(rig.query("select * from event_log_ranges()")) == 2
    (letter,) = await dead_letters(rig)
    error = letter.headers["dead-error"]
    assert [part.split(":")[0] for part in error.split("; ")] == ["row 0", "row 2", "row 3"]
    assert "make ids with a clock that is right" in error


@pytest.mark.timescaledb
async def test_what_is_older_than_the_retention_is_dropped_unless_a_session_is_open(
    hypertable_rig: Any, make: Any
) -> None:
    rig, now = hypertable_rig, utc_now()
    old, running, young = (make.new_session(now - timedelta(days=days)) for days in (90, 60, 1))
    async with rig.recorder():
        for sid in (old, running, young):
            await rig.publish(make.requested(sid), sid)
        await rig.publish(make.ended(old), old)
        await rig.floor_at(await rig.publish(make.ended(young), young))
    sessions = "select distinct session_id from event_log"
    async with rig.recorder() as recorder:  # everything is kept, unless somebody asks
        await rig.until(lambda: recorder.counters.leaderships == 1)
        await rig.floor_at(await rig.publish(make.placed(young, 1), young))
    assert len(rig.query(sessions)) == 3
    async with rig.recorder(retention_days=30):
        await rig.until(lambda: len(rig.query(sessions)) == 2)
    assert {row[0] for row in rig.query(sessions)} == {running, young}


async def test_a_new_stream_and_a_stream_that_was_set_back_begin_epochs(
    rig: Any, make: Any
) -> None:
    sid = make.new_session()
    async with rig.recorder():
        await rig.floor_at(await publish_steps(rig, make, sid, 0, 5))
    await rig.bus._js.delete_stream("DSEC")
    await rig.bus.ensure_stream()
    last = await publish_steps(rig, make, sid, 5, 7)
    async with rig.recorder(stall_limit_s=0.3):
        await rig.until(lambda: len(rig.keys(sid)) == 7)
        assert rig.query("select epoch, sequence from log_floor order by epoch") == [
            (1, 5),
            (2, last),
        ]
        # And under a recorder that runs.
        await rig.bus._js.delete_stream("DSEC")
        await rig.bus.ensure_stream()
        await publish_steps(rig, make, sid, 7, 9)
        await rig.until(lambda: len(rig.keys(sid)) == 9)
    # Set back and grown past the floor again: the message at the floor is another one.
    with psycopg.connect(rig.log_url) as connection:
        connection.execute(
            "update log_floor set message_time = message_time - interval '1 hour' where epoch = 3"
        )
    await publish_steps(rig, make, sid, 9, 10)
    async with rig.recorder():
        await rig.until(lambda: len(rig.keys(sid)) == 10)
        assert rig.query("select max(epoch) from log_floor") == [(4,)]
    assert rig.query("select count(*) from event_aside") == [(0,)]


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
async def test_a_stream_that_was_restored_and_went_on_is_noticed_whoever_has_the_floor(
    rig: Any, make: Any, running: bool
) -> None:
    """A fence stands where the floor was: it is never delivered to a recorder."""
    sid, changes = make.new_session(), {"trim_keep_s": 0, "trim_period_s": 0.2}
    async with rig.recorder(**changes) as recorder:
        await rig.floor_at(await publish_steps(rig, make, sid, 0, 3))
        await rig.server.save()
        last = await publish_steps(rig, make, sid, 3, 5)
        await rig.floor_at(last)
        if running:
            await set_back_and_go_on(rig, make, sid, last)
            await rig.until(lambda: len(rig.keys(sid)) == 7)
            await rig.until(lambda: recorder.leading)
    if not running:
        await set_back_and_go_on(rig, make, sid, last)
        async with rig.recorder(**changes):
            await rig.until(lambda: len(rig.keys(sid)) == 7)
    assert rig.query("select max(epoch) from log_floor") == [(2,)]


async def set_back_and_go_on(rig: Any, make: Any, sid: uuid.UUID, floor: int) -> None:
    await rig.server.set_back()
    await publish_steps(rig, make, sid, 5, 6)
    while (await rig.bus.stream_state()).last_sequence < floor:
        await rig.bus.fence("w1", "test")
    await publish_steps(rig, make, sid, 6, 7)


async def test_a_trimmed_message_at_the_floor_proves_nothing(rig: Any, make: Any) -> None:
    sid = make.new_session()
    async with rig.recorder(trim_keep_s=0, trim_period_s=0.1):
        await rig.floor_at(await publish_steps(rig, make, sid, 0, 3))
        async with asyncio.timeout(60):
            while (await rig.bus.stream_state()).messages:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    async with rig.recorder():
        await rig.floor_at(await publish_steps(rig, make, sid, 3, 5))
    assert rig.query("select epoch from log_floor") == [(1,)]


async def test_nothing_is_trimmed_of_a_stream_that_the_log_does_not_have(
    rig: Any, make: Any
) -> None:
    """It was set back and grew past the floor under a recorder whose consumer did not show it."""
    last = await publish_steps(rig, make, make.new_session(), 0, 3)
    stream = await rig.bus.stream_state()
    time = await rig.bus.message_time(last)
    settings = rig.settings(trim_keep_s=0)
    async with await psycopg.AsyncConnection.connect(rig.log_url, autocommit=True) as connection:
        for known, created in (
            (time - timedelta(seconds=1), stream.created),
            (time, stream.created - timedelta(seconds=1)),
        ):
            await connection.execute("delete from log_floor")
            await connection.execute(
                "insert into log_floor (epoch, stream_created, sequence, message_time)"
                " values (1, %s, %s, %s)",
                (created, last, known),
            )
            trimmer = Trimmer(rig.bus, settings, utc_now, 1, last)
            with pytest.raises(effects.StreamSetBack):
                await trimmer.trim(connection)
    assert (await rig.bus.stream_state()).messages == 3


async def test_a_first_delivery_of_what_was_read_is_no_repetition(rig: Any, make: Any) -> None:
    created = (await rig.bus.stream_state()).created
    feed = await effects.Feed.open(rig.bus, Floor(1, created, 0, None), rig.settings())
    feed._last = 10
    await publish_steps(rig, make, make.new_session(), 0, 1)
    with pytest.raises(effects.DeliveryGap, match="came first after 10"):
        await asyncio.wait_for(feed._pump, 60)
    await feed.close()


async def test_an_unknown_type_is_parked_and_logged_after_the_upgrade(rig: Any, make: Any) -> None:
    sid = make.new_session()
    headers = Envelope("e1", "session.requested.v9", "test", utc_now()).headers()
    body = make.requested(sid).body()
    parked = await rig.bus.publish_raw(f"dsec.session.requested.{sid}", body, headers)
    async with rig.recorder() as recorder:
        last = await rig.publish(make.placed(sid), sid)
        await rig.floor_at(last)
        await rig.until(
            lambda: recorder.counters.parked == 1
        )  # counted just after the floor is visible
    assert rig.query("select sequence, event_type, body, headers->>'ce-id' from event_parked") == [
        (parked, "session.requested.v9", body, "e1")
    ]
    # The upgrade: this version knows the type.
    with psycopg.connect(rig.log_url) as connection:
        connection.execute(
            "update event_parked set event_type = 'session.requested.v1',"
            " headers = replace(headers::text, 'v9', 'v1')::json"
        )
    async with rig.recorder():
        await rig.until(lambda: rig.keys(sid) == ["requested", "placed:1"])
    assert rig.query("select count(*) from event_parked") == [(0,)]
    assert rig.query("select sequence from event_log where key = 'requested'") == [(parked,)]
    assert rig.query("select sequence from log_floor") == [(last,)]


async def test_heartbeats_are_written_down_and_forgotten(rig: Any, make: Any) -> None:
    sid, gone = make.new_session(), make.new_session()
    beat = WorkerHeartbeat(
        fact=HeartbeatFact(worker="w1", node="n1", state="ready"),
        circumstance=HeartbeatCircumstance(
            sessions=[sid, gone], attempts=[2, 1], steps=[7, 1], waiting_on=["reward", "tick"]
        ),
    )

    told = beat

    async def beats() -> None:
        """As a worker does, for as long as it lives: one that nobody hears is followed by more."""
        while True:
            await rig.bus.publish_transient(
                told, "w1", source="test", time=utc_now(), event_id=str(uuid.uuid4())
            )
            await asyncio.sleep(0.1)

    beating = asyncio.create_task(beats())
    async with rig.recorder(heartbeat_write_s=0.05, live_keep_s=2.0):
        rows = (
            "select session_id, attempt, worker, step, waiting_on from session_live order by step"
        )
        both = [(gone, 1, "w1", 1, "tick"), (sid, 2, "w1", 7, "reward")]
        await rig.until(lambda: rig.query(rows) == both)
        alone = HeartbeatCircumstance(sessions=[sid], attempts=[2], steps=[15], waiting_on=["tick"])
        told = beat.model_copy(update={"circumstance": alone})
        await rig.until(lambda: rig.query(rows) == [(sid, 2, "w1", 15, "tick")])
    beating.cancel()


async def test_a_large_message_and_bounds_of_a_batch(rig: Any, make: Any) -> None:
    await rig.bus.ensure_stream(StreamOptions())
    sid = make.new_session()
    big = os.urandom(300_000)
    for n in range(12):
        last = await rig.publish(make.stepped([sid], [n], observations=[big]), "l1")
    async with rig.recorder(batch_bytes_max=1_000_000) as recorder:
        await rig.floor_at(last)
        # Counted just after the floor is visible.
        await rig.until(lambda: recorder.counters.messages == 12)
        assert recorder.counters.batches >= 5
    count = rig.query("select count(*) from event_log where observation = %s", big)
    assert count == [(12,)]


async def test_sigterm_ends_the_process_in_good_order(rig: Any, make: Any) -> None:
    environment = {
        **os.environ,
        "DSEC_NATS_URL": rig.url,
        "DSEC_DATABASE_URL": rig.log_url,
        "DSEC_RECORDER_FETCH_WAIT_S": "0.2",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsec.recorder", env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        sid = make.new_session()
        publishing = asyncio.create_task(publish_steps(rig, make, sid, 0, 100))
        await rig.until(lambda: rig.keys(sid))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        last = await publishing
        # What is logged is a beginning without a gap, and the next recorder goes on behind it.
        found = rig.keys(sid)
        assert found == [f"step:{n}" for n in range(len(found))]
        async with rig.recorder():
            await rig.floor_at(last)
        assert rig.keys(sid) == [f"step:{n}" for n in range(100)]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_bus_restarts(rig: Any, make: Any) -> None:
    sid = make.new_session()
    async with rig.recorder():
        await rig.floor_at(await publish_steps(rig, make, sid, 0, 3))
        await rig.server.stop()
        await rig.server.start()
        await rig.floor_at(await publish_steps(rig, make, sid, 3, 6))
        assert rig.keys(sid) == [f"step:{n}" for n in range(6)]


async def test_the_stream_is_kept_as_often_as_the_recorder_is_told(
    rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig.recorder(nats_replicas=3):  # of a single server, which it then says
        await rig.until(lambda: "DSEC_NATS_REPLICAS asks for several nodes" in caplog.text)
