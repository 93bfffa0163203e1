"""The stream of an earlier version: this one's recorder makes the same rows of it, and takes what
that one could not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from tests.upgrade.conftest import Message, Recorded, migrate_to

from dsec.platform.bus import Bus
from dsec.platform.clock import utc_now
from dsec.platform.migrations import migrate
from dsec.platform.stack.nats_server import NatsServerOptions, nats_server_process
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess
from dsec.recorder.leadership import Recorder
from dsec.recorder.settings import RecorderSettings
from dsec_contracts import BY_TYPE, canonical, parse
from dsec_contracts.worker import WorkerHeartbeat

pytestmark = [pytest.mark.nats, pytest.mark.postgres]
EXAMPLES = Path(__file__).parents[2] / "contracts" / "examples"
AS_JSON = ("fact_json", "circumstance")
LOGGED_S_MAX = 20.0


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus whose stream is empty."""
    options = NatsServerOptions(
        directory=tmp_path / "nats", log_path=tmp_path / "nats.log", port=free_port(), password="x"
    )
    child = ChildProcess(nats_server_process(options))
    await child.wait_ready()
    bus = await Bus.connect(options.url, "test")
    await bus.ensure_stream()
    try:
        yield bus
    finally:
        await bus.close()
        await child.stop()


@asynccontextmanager
async def recording(bus: Bus, database_url: str) -> AsyncIterator[Recorder]:
    """This version's recorder."""
    settings = RecorderSettings(database_url=database_url, fetch_wait_s=0.1, retry_wait_s_max=0.3)
    recorder = Recorder(bus, settings, utc_now)
    stop = asyncio.Event()
    task = asyncio.create_task(recorder.run(stop))
    try:
        yield recorder
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


async def until(database_url: str, query: str, *arguments: object) -> None:
    """Until a query has a row."""
    async with asyncio.timeout(LOGGED_S_MAX):
        while not rows(database_url, query, *arguments):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def rows(database_url: str, query: str, *arguments: object) -> list[dict[str, Any]]:
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        return connection.execute(query, arguments or None).fetchall()


def says_all(new: Any, old: Any) -> bool:
    """Whether everything that `old` says stands in `new`, which may have more keys."""
    if isinstance(new, dict) and isinstance(old, dict):
        return all(key in new and says_all(new[key], value) for key, value in old.items())
    if isinstance(new, list) and isinstance(old, list):
        return len(new) == len(old) and all(map(says_all, new, old))
    return bool(new == old)


def differences(found: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """By column. JSON, which only queries read, may say more than it did; nothing less."""
    wrong = {}
    for name, value in told.items():
        if name in AS_JSON and value is not None:
            if not says_all(json.loads(found[name]), json.loads(value)):
                wrong[name] = found[name], value
        elif found[name] != value:
            wrong[name] = found[name], value
    return wrong


async def test_the_same_messages_make_the_same_rows(
    bus: Bus, fresh_database_url: str, recorded: Recorded
) -> None:
    migrate(fresh_database_url)
    last = recorded.messages[-1].sequence
    await recorded.publish(bus, last)
    async with recording(bus, fresh_database_url) as recorder:
        await until(fresh_database_url, "select 1 from log_floor where sequence >= %s", last)
        assert recorder.counters.dead_letters == 0
    names = [f"l.{name}::text" if name in AS_JSON else f'l."{name}"' for name in recorded.rows[0]]
    found = rows(
        fresh_database_url,
        f'select {", ".join(names)} from event_log l order by epoch, sequence, "index"',
    )
    assert len(found) == len(recorded.rows)
    for one, told in zip(found, recorded.rows, strict=True):
        assert differences(one, told) == {}, told["key"]
    assert rows(fresh_database_url, "select 1 from event_aside") == []
    assert rows(fresh_database_url, "select 1 from event_parked") == []


async def test_a_log_that_is_read_again_from_the_stream_finds_nothing_else(
    bus: Bus, fresh_database_url: str, recorded: Recorded
) -> None:
    """The rows of that version, and its messages under this one's eyes: as after a stream that was
    restored. What is equal is one row; nothing is taken for a determinism violation."""
    migrate_to(fresh_database_url, recorded.revision)
    last = recorded.messages[-1].sequence
    with psycopg.connect(fresh_database_url) as connection:
        recorded.insert(connection, last)
        created = recorded.rows[0]["event_time"]
        recorded.set_floor(connection, last, created, created)  # of a stream that is no more
    migrate(fresh_database_url)
    await recorded.publish(bus, last)
    async with recording(bus, fresh_database_url):
        reached = "select 1 from log_floor where epoch = 2 and sequence >= %s"
        await until(fresh_database_url, reached, last)
    count = rows(fresh_database_url, "select count(*) as n from event_log")[0]["n"]
    assert count == len(recorded.rows)
    assert rows(fresh_database_url, "select session_id, key, verdict from event_aside") == []


def examples_after(recorded: Recorded) -> list[Message]:
    """One message of each type that the recorded version cannot have known."""
    known = {row["kind"] for row in recorded.rows}
    found = []
    for event_type in ("anchor.captured.v1", "anchor.stored.v1", "session.resumed.v1"):
        name, version = event_type.rsplit(".v", 1)
        assert name not in known
        assert event_type in BY_TYPE
        path = min((EXAMPLES / name / version).glob("*.json"))
        told = json.loads(path.read_text())
        body = json.dumps(told["body"]).encode()
        event = parse(event_type, body)
        key = getattr(event, "fact").session_id  # noqa: B009 - the base class has none
        found.append(Message(0, f"dsec.{name}.{key}", told["headers"], body))
    return found


async def test_what_that_version_parked_is_logged_after_the_upgrade(
    bus: Bus, fresh_database_url: str, recorded: Recorded
) -> None:
    parked = examples_after(recorded)
    migrate_to(fresh_database_url, recorded.revision)
    created = (await bus.stream_state()).created
    last = 0
    with psycopg.connect(fresh_database_url) as connection:
        for message in parked:
            last = await bus.publish_raw(message.subject, message.body, message.headers)
            connection.execute(
                "insert into event_parked (epoch, sequence, subject, event_type, headers, body)"
                " values (1, %s, %s, %s, %s, %s)",
                (
                    last,
                    message.subject,
                    message.headers["ce-type"],
                    json.dumps(message.headers),
                    message.body,
                ),
            )
        time = await bus.message_time(last)
        recorded.set_floor(connection, last, created, time)
    migrate(fresh_database_url)
    async with recording(bus, fresh_database_url):
        await until(fresh_database_url, "select 1 where not exists (select from event_parked)")
    found = rows(fresh_database_url, "select sequence, kind, fact from event_log order by sequence")
    assert [row["sequence"] for row in found] == list(range(1, len(parked) + 1))
    for row, message in zip(found, parked, strict=True):
        assert row["fact"] == canonical.encode(json.loads(message.body)["fact"])


async def test_messages_of_both_versions_are_rows_side_by_side(
    bus: Bus, fresh_database_url: str, recorded: Recorded
) -> None:
    """While workers are replaced one by one: the same event, with and without what is new in it."""
    migrate(fresh_database_url)
    old = next(m for m in recorded.messages if m.headers.get("ce-type") == "worker.fenced.v1")
    new = json.loads((EXAMPLES / "worker.fenced" / "1" / "killed_from_outside.json").read_text())
    assert "suspect_only" in new["body"]["fact"]["culprit"]
    assert b"suspect_only" not in old.body
    await bus.publish_raw(old.subject, old.body, {**old.headers})
    new_body = json.dumps(new["body"]).encode()
    worker = new["body"]["fact"]["worker"]
    last = await bus.publish_raw(f"dsec.worker.fenced.{worker}", new_body, new["headers"])
    async with recording(bus, fresh_database_url):
        await until(fresh_database_url, "select 1 from log_floor where sequence >= %s", last)
    found = rows(fresh_database_url, "select key, fact from event_log order by sequence")
    told = {row["key"]: row["fact"] for row in recorded.rows if row["kind"] == "worker.fenced"}
    assert found[0]["fact"] == told[found[0]["key"]]
    assert found[1]["fact"] == canonical.encode(new["body"]["fact"])


def test_heartbeats_of_that_version_are_understood(recorded: Recorded) -> None:
    states = set()
    for message in recorded.heartbeats:
        event = parse(message.headers["ce-type"], message.body)
        assert isinstance(event, WorkerHeartbeat)
        assert says_all(json.loads(event.body()), json.loads(message.body))
        states.add(event.fact.state)
        if event.fact.state == "dead":
            assert event.fact.culprit is not None
            assert event.fact.culprit.suspect_only is None, "its deaths count as they did"
            assert isinstance(event.fact.culprit.session_id, UUID)
    assert states >= {"ready", "dead"}
