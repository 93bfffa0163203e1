"""The client on a real bus and a real log: what is asked again, and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from uuid import UUID

import psycopg
import pytest

from dsec.client.client import Client
from dsec.client.publishing import RequestIncomplete
from dsec.client.queries import Queries
from dsec.platform.bus import Bus, BusUnavailable
from dsec_contracts import Event, SessionRequested
from dsec_contracts.keys import session_time

SESSION = {"agent": "a" * 64, "env": "b" * 64, "reward": "c" * 64, "seed": 7, "max_steps": 5}
FIRST = UUID("01a22b73-29d2-725d-8e5a-7d7fb9de0398")


async def requested(bus: Bus) -> list[SessionRequested]:
    """All requests on the bus."""
    consumer = await bus.consumer("test-client", ["dsec.session.requested.*"], ack="none")
    count, found = (await consumer.state()).pending, list[Event]()
    async with asyncio.timeout(60):
        while len(found) < count:
            found += [m.event() for m in await consumer.fetch(count - len(found), 1)]
    await consumer.close()
    await bus.delete_consumer("test-client")
    return [event for event in found if isinstance(event, SessionRequested)]


class FailingBus(Bus):
    """A bus that goes away in the middle of a bulk publish."""

    left = 3
    under_way = 0

    async def publish(self, *args: object, **how: object) -> int:
        if self.left == 0:
            while self.under_way:  # noqa: ASYNC110 - those before are acknowledged …
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # … and whoever asked has counted them
            raise BusUnavailable("not acknowledged")
        self.left -= 1
        self.under_way += 1
        try:
            return await super().publish(*args, **how)  # type: ignore[arg-type]
        finally:
            self.under_way -= 1


@pytest.mark.nats
async def test_a_request_that_failed_half_way_is_repeated_under_the_same_ids(
    nats_url: str,
) -> None:
    bus = await FailingBus.connect(nats_url, "test")
    await bus.ensure_stream()
    before = len(await requested(bus))
    async with Client(nats_url=nats_url, database_url="postgresql://unused/x") as client:
        client._bus = bus
        with pytest.raises(RequestIncomplete, match="3 of 10 sessions of group g"):
            await client.request(SESSION, count=10, group_id="g", labels={"a": "b"})
        first = await requested(bus)
        assert len(first) - before == 3
        bus.left = 100
        group = await client.request(SESSION, count=10, group_id="g", labels={"a": "b"})
        everything = (await requested(bus))[before:]
        assert len(everything) == 10, "none is there twice"
        assert {e.fact.session_id for e in everything} == set(group.session_ids)
        assert {e.fact.session_id for e in first[before:]} < set(group.session_ids)
        other = await client.request(SESSION, count=10, group_id="g", labels={"a": "b"})
        assert not set(other.session_ids) & set(group.session_ids), "that one had succeeded"


class Asked(Queries):
    """Queries that note what they were asked about."""

    def __init__(self, queries: Queries) -> None:
        super().__init__(queries._engine)
        self.about: list[set[UUID]] = []

    async def ended(self, ids: Sequence[UUID]) -> set[UUID]:
        self.about.append(set(ids))
        return await super().ended(ids)


@pytest.fixture
async def log(log_url: str) -> AsyncIterator[psycopg.Connection]:
    connection = psycopg.connect(log_url, autocommit=True)
    connection.execute(
        "insert into log_floor (epoch, stream_created, sequence) values (1, now(), 1000)"
    )
    yield connection
    connection.close()


def end(log: psycopg.Connection, session_id: UUID, sequence: int) -> None:
    """Have a session ended."""
    log.execute(
        "insert into event_log (session_id, session_at, sequence, event_time, epoch, index, version"
        ", kind, key, fact, event_id) values (%s, %s, %s, now(), 1, 0, 1, 'session.ended', 'ended'"
        ", ''::bytea, 'e')",
        [session_id, session_time(session_id), sequence],
    )


@pytest.mark.postgres
async def test_only_sessions_that_are_not_over_are_asked_about(
    log: psycopg.Connection, log_url: str
) -> None:
    ids = [UUID(int=FIRST.int + n) for n in range(3)]
    async with Client(nats_url="nats://unused", database_url=log_url) as client:
        client.queries = asked = Asked(client.queries)
        end(log, ids[1], 1)
        found: list[UUID] = []
        async for over in client.finished(ids):
            found += over
            for n, session_id in enumerate(ids):
                if session_id not in found:
                    end(log, session_id, 2 + n)
    assert found[0] == ids[1]
    assert set(found) == set(ids)
    assert asked.about[0] == set(ids)
    assert all(ids[1] not in about for about in asked.about[1:])
