"""The log of an earlier version: its rows are read, checked, compared and migrated by this one."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from tests.upgrade.conftest import VERSIONS, Recorded, migrate_to

from dsec.client.client import Client
from dsec.client.verification import verify_sessions
from dsec.platform.migrations import check_schema, migrate
from dsec.replay.diff import LogSource, RowsSource, diff
from dsec.replay.fold import fold

SERVERS = [
    pytest.param("fresh_database_url", id="postgresql"),
    pytest.param("fresh_timescale_url", id="timescaledb", marks=pytest.mark.timescaledb),
]
NO_BUS = "nats://127.0.0.1:1"


def test_there_are_versions_to_read():
    assert VERSIONS


def test_each_session_folds_to_what_it_came_to(recorded: Recorded):
    for told in recorded.sessions:
        state = fold(recorded.log_rows(told["session_id"]))
        assert state.intact, state.fault
        found = state.status, state.code, state.steps, state.reward_total, state.chain_hash
        names = ("status", "code", "steps", "reward_total", "chain_hash")
        assert found == tuple(told[name] for name in names), told


async def test_the_first_difference_is_found(recorded: Recorded):
    one, other = (
        RowsSource(recorded.log_rows(told["session_id"])) for told in recorded.of_case("env_reward")
    )
    assert (await diff(one, one)).equal
    found = await diff(one, other)  # of another seed
    assert found.first_difference is not None
    assert (found.first_difference.step, found.first_difference.field) == (None, "reset.state_hash")


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest) -> str:
    """An empty database."""
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.mark.postgres
async def test_a_database_is_migrated_and_read(recorded: Recorded, url: str) -> None:
    migrate_to(url, recorded.revision)
    last = recorded.messages[-1].sequence
    with psycopg.connect(url, row_factory=dict_row) as connection:
        recorded.insert(connection, last)
        created = recorded.rows[0]["event_time"]
        recorded.set_floor(connection, last, created, created)
    migrate(url)
    check_schema(url)
    async with Client(nats_url=NO_BUS, database_url=url) as client:
        await _compare(client, recorded)


async def _compare(client: Client, recorded: Recorded) -> None:
    """Everything that is asked of a log: what sessions came to, verification, differences."""
    ids = [UUID(told["session_id"]) for told in recorded.sessions]
    expected = {told["session_id"]: told for told in recorded.sessions}
    for summary in await client.queries.summaries(ids):
        told: dict[str, Any] = expected.pop(str(summary.session_id))
        for name in ("status", "code", "steps", "reward_total", "chain_hash"):
            assert getattr(summary, name) == told[name], told
    assert not expected
    verdicts = await verify_sessions(client, ids)
    assert [verdict for verdict in verdicts if not verdict["ok"]] == []
    assert all(verdict["reward_ok"] for verdict in verdicts)
    log = await client.log()
    one, other = (UUID(told["session_id"]) for told in recorded.of_case("tools"))
    assert (await diff(LogSource(log, one), LogSource(log, one))).equal
    assert not (await diff(LogSource(log, one), LogSource(log, other))).equal
