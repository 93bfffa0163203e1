"""The log's reader on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import psycopg
import pytest

from dsec.platform.connections import Connections
from dsec.platform.db import DatabaseError
from dsec.platform.log import LogBehind, LogReader, LogUnavailable, Position
from dsec_contracts import SYSTEM_SESSION, canonical
from dsec_contracts.keys import session_time

pytestmark = pytest.mark.postgres
ASKED_WITHIN_S = 0.5
"""A wait that is too short for a floor that does not come, and long enough to ask for it once."""
WAIT_S_MAX = 60.0
NOW = datetime(2026, 5, 4, 3, 2, 1, 5, tzinfo=UTC)
A = UUID("01a22b62-cb9a-7845-b0fc-9a0059a193e6")
B = UUID("01a22b62-cb9b-7845-b0fc-9a0059a193e6")


class Log:
    """Rows are put in as a recorder would."""

    def __init__(self, url: str, reader: LogReader) -> None:
        self.url = url
        self.reader = reader
        self.connection = psycopg.connect(url, autocommit=True)

    def put(
        self, session_id: UUID, key: str, kind: str, sequence: int, epoch: int = 1, **columns: Any
    ) -> None:
        row = {
            "session_id": session_id,
            "session_at": session_time(session_id),
            "sequence": sequence,
            "event_time": NOW,
            "epoch": epoch,
            "index": 0,
            "version": 1,
            "kind": kind,
            "key": key,
            "fact": b"f",
            "event_id": f"e{sequence}",
        } | columns
        names = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join(["%s"] * len(row))
        statement = f"insert into event_log ({names}) values ({marks})"
        self.connection.execute(statement, list(row.values()))

    def floor(self, epoch: int, sequence: int) -> None:
        self.connection.execute(
            "insert into log_floor (epoch, stream_created, sequence) values (%s, %s, %s)"
            " on conflict (epoch) do update set sequence = excluded.sequence",
            (epoch, NOW, sequence),
        )


@pytest.fixture
async def log(log_url: str) -> AsyncIterator[Log]:
    reader = await LogReader.connect(log_url)
    found = Log(log_url, reader)
    yield found
    found.connection.close()
    await reader.close()


async def test_the_rows_of_a_session_in_the_order_of_the_log(log: Log) -> None:
    log.put(A, "step:0", "session.stepped", 7, 2, step=0, value=-0.0, chain=b"c", index=1)
    log.put(A, "requested", "session.requested", 9, circumstance='{"client": "a\\u0000"}')
    log.put(A, "step:1", "session.stepped", 7, 2, step=1, value=float("nan"), index=2)
    log.put(A, "step:2", "session.stepped", 8, 2, step=2)
    log.put(B, "requested", "session.requested", 1)
    log.floor(1, 9)
    log.floor(2, 8)
    rows = await log.reader.rows(A)
    assert [r.key for r in rows] == ["requested", "step:0", "step:1", "step:2"]
    assert [r.position for r in rows] == [(1, 9, 0), (2, 7, 1), (2, 7, 2), (2, 8, 0)]
    first, second = rows[:2]
    assert first.circumstance == {"client": "a\0"}
    assert (second.session_id, second.fact, second.chain, second.event_time) == (A, b"f", b"c", NOW)
    assert str(second.value) == "-0.0"
    assert second.terminated is None
    # Up to a position of the current stream: all of the streams before it, and not what follows.
    assert [r.key for r in await log.reader.rows(A, upto=7)] == ["requested", "step:0", "step:1"]
    assert [r.key for r in await log.reader.rows(A, upto=6)] == ["requested"]
    # Up to a position of another epoch than the one that the log is in.
    for upto, epoch, count in ((8, 1, 0), (9, 1, 1), (7, 2, 3), (0, 3, 4)):
        assert len(await log.reader.rows(A, upto=upto, epoch=epoch)) == count
    assert await log.reader.rows(UUID(int=1)) == []
    found = await log.reader.row(A, "step:1")
    assert found is not None
    assert found == rows[2] or found.key == rows[2].key  # a NaN is not equal to itself
    assert await log.reader.row(A, "step:3") is None
    assert await log.reader.last_step(A) == 2
    assert await log.reader.last_step(B) is None


async def test_the_floor_is_waited_for(log: Log) -> None:
    assert await log.reader.floor() == Position(0, 0)
    with pytest.raises(LogBehind, match="stands at 0"):
        await log.reader.wait_floor(1, ASKED_WITHIN_S)
    log.floor(1, 5)
    waiting = asyncio.create_task(log.reader.wait_floor(7, WAIT_S_MAX))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    log.floor(1, 8)
    await waiting
    # A new stream counts from the beginning, and its floor is the floor.
    log.floor(2, 3)
    assert await log.reader.floor() == Position(2, 3)
    with pytest.raises(LogBehind, match="stands at 3"):
        await log.reader.wait_floor(7, ASKED_WITHIN_S)


async def test_epochs_compare_first(log: Log) -> None:
    log.floor(1, 9)
    await log.reader.wait_floor(9, WAIT_S_MAX, epoch=1)
    # The new stream's message 5, of which the log has nothing yet, whatever the old one had.
    with pytest.raises(LogBehind, match=r"5 of epoch 2 .* at 9 of epoch 1"):
        await log.reader.wait_floor(5, ASKED_WITHIN_S, epoch=2)
    waiting = asyncio.create_task(log.reader.wait_floor(10, WAIT_S_MAX, epoch=1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    log.floor(2, 0)
    await waiting  # the old stream is over: nothing more of it will come
    await log.reader.wait_floor(1000, WAIT_S_MAX, epoch=1)
    with pytest.raises(LogBehind):
        await log.reader.wait_floor(1, 0.1, epoch=2)


async def test_specs_come_back_byte_for_byte(log: Log) -> None:
    content = canonical.encode({"kind": "env", "document": {"a": 1}, "files": {"x.py": b"\xff\0"}})
    spec_hash = hashlib.sha256(content).hexdigest()
    fact = {
        "spec_hash": spec_hash,
        "kind": "env",
        "content": base64.urlsafe_b64encode(content).decode(),
    }
    log.put(
        SYSTEM_SESSION,
        f"spec:{spec_hash}",
        "spec.registered",
        1,
        fact=canonical.encode(fact),
        fact_json=json.dumps({"kind": "env"}),
    )
    found = await log.reader.spec(spec_hash)
    assert found is not None
    assert (found.content, found.kind, found.blob) == (content, "env", None)
    assert found.value()["files"] == {"x.py": b"\xff\0"}
    assert await log.reader.spec("0" * 64) is None
    assert await log.reader.known_specs() == {spec_hash: "env"}


async def test_connections_that_died_are_replaced(log: Log) -> None:
    log.floor(1, 5)
    assert await log.reader.floor() == Position(1, 5)
    log.connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where pid <> pg_backend_pid() and datname = current_database()"
    )
    assert await log.reader.floor() == Position(1, 5)


async def test_a_database_that_is_away_is_said_to_be_away(log: Log) -> None:
    reader = await LogReader.connect("postgresql://dsec:x@127.0.0.1:1/none")
    with pytest.raises(LogUnavailable):
        await reader.floor()
    with pytest.raises(LogBehind, match="cannot be asked"):
        await reader.wait_floor(1, ASKED_WITHIN_S)
    await reader.close()


async def test_many_queries_at_once_share_the_pool(log: Log) -> None:
    log.floor(1, 5)
    floors = await asyncio.gather(*(log.reader.floor() for _ in range(50)))
    assert floors == [Position(1, 5)] * 50


class Wire:
    """Stands between a reader and its database, and carries nothing while it is cut.

    What a machine that hangs or a network that swallows packets looks like: nobody is refused.
    """

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self.whole = asyncio.Event()
        self.whole.set()

    async def serve(self) -> str:
        """Begin to listen. Returns the URL to connect to."""
        self._listener = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        host = f"{self._server.username}:{self._server.password}@127.0.0.1:{port}"
        return urlunsplit(self._server._replace(netloc=host))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(self._server.hostname, self._server.port)
        await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self.whole.wait()
                writer.write(data)
        writer.close()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


async def test_a_database_that_hangs_is_away_and_comes_back(log_url: str) -> None:
    wire = Wire(log_url)
    reader = LogReader(Connections(await wire.serve(), command_timeout_s=2.0))
    try:
        assert await reader.floor() == Position(0, 0)
        wire.whole.clear()
        async with asyncio.timeout(WAIT_S_MAX / 2):
            with pytest.raises(LogUnavailable):
                await reader.floor()
        wire.whole.set()
        async with asyncio.timeout(WAIT_S_MAX / 2):
            assert await reader.floor() == Position(0, 0)
    finally:
        await reader.close()
        wire.close()


async def test_a_pooler_that_hands_out_transactions_is_named(log_url: str) -> None:
    """Behind one, what was prepared on a connection is gone at the next transaction."""
    connections = Connections(log_url, connections_max=1)
    reader = LogReader(connections)
    try:
        assert await reader.floor() == Position(0, 0)
        await connections.fetch("deallocate all")
        with pytest.raises(DatabaseError, match="pool_mode session"):
            await reader.floor()
    finally:
        await reader.close()
