"""Dropping what is old and rewards by the hour, on every edition."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from dsec.platform import db, migrations
from dsec.platform.storage import LogStorage, log_storage
from dsec_contracts import SYSTEM_SESSION

pytestmark = pytest.mark.postgres
LONG_AGO = datetime(2021, 3, 10, 5, 30, tzinfo=UTC)
LATER = LONG_AGO + timedelta(days=90)
RECENT = datetime(2026, 5, 4, 3, 2, tzinfo=UTC)
BOUND = datetime(2026, 1, 1, tzinfo=UTC)


def session_of(at: datetime, number: int) -> UUID:
    return UUID(int=int(at.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62 | number)


def request(log: Any, session_id: UUID, agent: str = "x", **columns: Any) -> UUID:
    fact = {"agent_spec": agent}
    log.put(session_id, "requested", "session.requested", fact_json=fact, **columns)
    return session_id


def reward(log: Any, session_id: UUID, step: int, value: float, revision: int = 1) -> None:
    key = f"reward:{step}.{revision}"
    log.put(session_id, key, "reward.scored", step=step, value=value)


def missing(log: Any, session_id: UUID, step: int) -> None:
    log.put(session_id, f"reward_missing:{step}", "reward.missing", step=step)


def hourly(log: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = log.connection.execute(
        "select bucket, agent_spec, sessions, rewards, reward_sum, reward_min, reward_max, missing"
        " from reward_hourly order by 1, 2"
    ).fetchall()
    return found


def put_rewards(log: Any) -> list[tuple[Any, ...]]:
    """Sessions of two agents in two hours; returns what the view has to say of them."""
    plain, revised, other = (session_of(RECENT, number) for number in range(3))
    late = session_of(RECENT + timedelta(hours=1), 3)
    for session_id, agent in ((plain, "x"), (revised, "x"), (other, "y"), (late, "x")):
        request(log, session_id, agent)
        reward(log, session_id, 0, 1.0)
    reward(log, plain, 1, 2.0)
    for step in (1, 2, 3):
        missing(log, revised, step)
    reward(log, revised, 2, 50.0)  # late, after it was missing
    for revision, value in ((2, 500.0), (10, 5.0)):
        reward(log, revised, 0, value, revision)
    hour, next_hour = RECENT.replace(minute=0), RECENT.replace(minute=0, hour=4)
    return [
        (hour, "x", 2, 4, 58.0, 1.0, 50.0, 2),
        (hour, "y", 1, 1, 1.0, 1.0, 1.0, 0),
        (next_hour, "x", 1, 1, 1.0, 1.0, 1.0, 0),
    ]


def put_old_sessions(log: Any) -> UUID:
    """Finished sessions in one partition, an open one in another, and recent ones."""
    for at in (LONG_AGO, LATER, RECENT):
        log.connection.execute("select event_log_partition(%s, 99)", (at,))
    ended = request(log, session_of(LONG_AGO, 1))
    log.put(ended, "ended", "session.ended")
    request(log, session_of(LONG_AGO, 2), event_id="r1")
    log.put(SYSTEM_SESSION, "rejected:r1", "session.rejected")
    running = request(log, session_of(LATER, 1))
    recent = request(log, session_of(RECENT, 1))
    log.put(recent, "ended", "session.ended")
    log.connection.execute(
        "insert into event_aside select l.*, 'conflict', 1, 1, 1 from event_log l"
        " where key = 'ended'"
    )
    return running


def drop(log: Any) -> int:
    return len(log.connection.execute("select event_log_drop(%s)", (BOUND,)).fetchall())


def left(log: Any, table: str = "event_log") -> set[UUID]:
    return {row[0] for row in log.connection.execute(f"select session_id from {table}").fetchall()}


def test_rewards_by_the_hour_are_the_newest_of_each_step(log: Any) -> None:
    expected = put_rewards(log)
    assert hourly(log) == expected


def test_what_is_old_is_dropped_and_never_an_open_session(log: Any) -> None:
    running = put_old_sessions(log)
    assert drop(log) == 1
    assert left(log) == {SYSTEM_SESSION, running, session_of(RECENT, 1)}
    assert left(log, "event_aside") == {session_of(RECENT, 1)}
    assert drop(log) == 0
    log.put(running, "ended", "session.ended")
    assert drop(log) == 1
    assert left(log) == {SYSTEM_SESSION, session_of(RECENT, 1)}


@pytest.mark.timescaledb
def test_the_apache_edition_has_plain_views_and_says_what_it_lacks(
    fresh_timescale_url: str,
) -> None:
    migrations.migrate(fresh_timescale_url)
    storage = log_storage(fresh_timescale_url)
    assert storage is not None
    assert (storage.hypertable, storage.licence, storage.features) == (True, "apache", False)
    assert "lacks compression, continuous aggregates and retention" in storage.sentence()
    with psycopg.connect(fresh_timescale_url) as connection:
        kinds = "select relkind from pg_class where relname = 'session_reward'"
        assert connection.execute(kinds).fetchone() == ("v",)
        jobs = "select count(*) from timescaledb_information.jobs where hypertable_name is not null"
        assert connection.execute(jobs).fetchone() == (0,)


@pytest.mark.timescaledb
def test_who_may_not_make_the_extension_gets_native_partitions(
    fresh_timescale_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"poor_{fresh_timescale_url[-8:]}"
    with psycopg.connect(fresh_timescale_url, autocommit=True) as connection:
        connection.execute(f"create role {name} login password 'x'")
        connection.execute(f"grant create on schema public to {name}")
    host = fresh_timescale_url.rpartition("@")[2]
    migrations.migrate(f"postgresql://{name}:x@{host}")
    migrations.check_schema(fresh_timescale_url)
    assert "an administrator" in caplog.text
    assert log_storage(fresh_timescale_url) == LogStorage(False, None, None, False)
    with psycopg.connect(fresh_timescale_url, autocommit=True) as connection:
        connection.execute(f"drop owned by {name}; drop role {name}")


def test_plain_postgresql_is_named_and_so_is_a_database_without_a_log(
    fresh_database_url: str,
) -> None:
    assert log_storage(fresh_database_url) is None
    migrations.migrate(fresh_database_url)
    storage = log_storage(fresh_database_url)
    assert storage == LogStorage(False, None, None, False)
    assert "without TimescaleDB" in storage.sentence()
    with pytest.raises(db.DatabaseError, match="does not answer"):
        log_storage("postgresql://nobody@127.0.0.1:1/none")


@pytest.mark.timescale_community
def test_the_community_edition_keeps_rewards_up(community_url: str, community_log: Any) -> None:
    expected = put_rewards(community_log)
    assert hourly(community_log) == expected  # not yet materialised: read from the log
    connection = community_log.connection
    materialised = (
        "select format('select count(*) from %I.%I', materialization_hypertable_schema,"
        " materialization_hypertable_name) from timescaledb_information.continuous_aggregates"
    )
    run_job(connection, "policy_refresh_continuous_aggregate")
    (query,) = connection.execute(materialised).fetchone()
    assert connection.execute(query).fetchone() == (4,)
    assert hourly(community_log) == expected
    reward(community_log, session_of(RECENT, 2), 1, 9.0)
    run_job(connection, "policy_refresh_continuous_aggregate")
    assert hourly(community_log)[1][2:5] == (1, 2, 10.0)


@pytest.mark.timescale_community
def test_the_community_edition_compresses_and_drops_finished_chunks(
    community_url: str, community_log: Any
) -> None:
    running = put_old_sessions(community_log)
    connection = community_log.connection
    run_job(connection, "event_log_compress")
    compressed = (
        "select range_start <= %s and range_end > %s from timescaledb_information.chunks"
        " where hypertable_name = 'event_log' and is_compressed order by range_start"
    )
    assert connection.execute(compressed, (LONG_AGO, LONG_AGO)).fetchall() == [(True,), (False,)]
    # A late row still finds its place, and a redelivered one its duplicate.
    reward(community_log, session_of(LONG_AGO, 1), 0, 1.0)
    with pytest.raises(psycopg.errors.UniqueViolation):
        community_log.put(session_of(LONG_AGO, 1), "ended", "session.ended")
    assert drop(community_log) == 1
    assert left(community_log) == {SYSTEM_SESSION, running, session_of(RECENT, 1)}


@pytest.mark.timescale_community
def test_the_community_database_is_what_the_metadata_says(community_url: str) -> None:
    migrations.migrate(community_url)
    migrations.check_schema(community_url)
    storage = log_storage(community_url)
    assert storage is not None
    assert (storage.hypertable, storage.licence, storage.features) == (True, "timescale", True)
    assert "finished chunks are compressed" in storage.sentence()


def run_job(connection: Any, procedure: str) -> None:
    query = "select job_id from timescaledb_information.jobs where proc_name = %s"
    (job,) = connection.execute(query, (procedure,)).fetchone()
    connection.execute(f"call run_job({job})")
