"""An upgrade in the middle of things: sessions that an earlier version's worker was stepping are
brought to the end that they had there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from tests.upgrade.conftest import Recorded, migrate_to

from dsec.cli.services import service_commands
from dsec.client.client import Client
from dsec.client.verification import verify_sessions
from dsec.platform.bus import Bus, StreamOptions
from dsec.platform.migrations import migrate
from dsec.platform.roles import OPERATOR
from dsec.platform.stack import Endpoints, Stack, StackOptions
from dsec.platform.stack.database_roles import OWNER

pytestmark = [pytest.mark.stack, pytest.mark.long]
LOGGED_BEHIND = 10
"""Messages at the end of the stream that the earlier recorder had not committed."""
STEPS_BEFORE = 4
ENDED_S_MAX = 90.0


@dataclass
class Upgraded:
    """A stack of this version on what the earlier one left, cut in the middle."""

    endpoints: Endpoints
    cut: int

    def sql(self, query: str, *arguments: object) -> list[dict[str, Any]]:
        with psycopg.connect(self.endpoints.database_url, row_factory=dict_row) as connection:
            return connection.execute(query, arguments or None).fetchall()


def middle(recorded: Recorded) -> int:
    """The sequence at which every session with tools has some steps and none has all."""
    ids = {UUID(told["session_id"]) for told in recorded.of_case("tools")}
    steps = [row for row in recorded.rows if row["kind"] == "session.stepped"]
    steps = [row for row in steps if row["session_id"] in ids]
    begun = max(row["sequence"] for row in steps if row["step"] == STEPS_BEFORE)
    done = min(row["sequence"] for row in steps if row["step"] == max(r["step"] for r in steps))
    assert begun < done
    return begun


@pytest.fixture
async def upgraded(recorded: Recorded, tmp_path: Path) -> AsyncIterator[Upgraded]:
    """Servers with that version's stream and log, and this version's services on them."""
    cut = middle(recorded)
    floor = cut - LOGGED_BEHIND
    options = StackOptions(tmp_path / "state", services=service_commands())
    async with Stack(options, on_progress=print) as stack:
        endpoints = await stack.start_servers()
        bus = await Bus.connect(stack.nats_url_of(OPERATOR), "upgrade")
        await bus.ensure_stream(StreamOptions())
        await recorded.publish(bus, cut)
        owner_url = stack.database_url_of(OWNER)
        migrate_to(owner_url, recorded.revision)
        with psycopg.connect(owner_url) as connection:
            recorded.insert(connection, floor)
            created, time = (await bus.stream_state()).created, await bus.message_time(floor)
            recorded.set_floor(connection, floor, created, time)
        await bus.close()
        migrate(owner_url)
        await stack.start_services({})
        yield Upgraded(endpoints, cut)


async def test_sessions_in_the_middle_end_as_they_did(
    recorded: Recorded, upgraded: Upgraded
) -> None:
    ids = {UUID(told["session_id"]): told for told in recorded.sessions}
    endpoints = upgraded.endpoints
    async with Client(
        nats_url=endpoints.nats_url,
        database_url=endpoints.database_url,
        object_store_url=endpoints.object_store_url,
    ) as client:
        await client.wait(list(ids), timeout_s=ENDED_S_MAX)
        for one in await client.queries.summaries(list(ids)):
            told = ids[one.session_id]
            for name in ("status", "code", "steps", "reward_total", "chain_hash"):
                assert getattr(one, name) == told[name], told
        verdicts = await verify_sessions(client, list(ids))
    assert [verdict for verdict in verdicts if not verdict["ok"]] == []
    # The steps that the earlier worker had published are where it put them: not one came again.
    found = upgraded.sql(
        "select session_id, key, fact, sequence from event_log"
        " where kind = 'session.stepped' and epoch = 1 and sequence <= %s",
        upgraded.cut,
    )
    told_rows = {
        (row["session_id"], row["key"]): (row["fact"], row["sequence"])
        for row in recorded.rows
        if row["kind"] == "session.stepped" and row["sequence"] <= upgraded.cut
    }
    assert {(r["session_id"], r["key"]): (r["fact"], r["sequence"]) for r in found} == told_rows
    assert upgraded.sql("select key from event_aside where verdict = 'conflict'") == []
    # They were brought back, not begun anew: by another worker, after the old one was fenced.
    moved = upgraded.sql(
        "select distinct session_id from event_log where kind = 'session.placed'"
        " and sequence > %s and attempt > 1",
        upgraded.cut,
    )
    in_the_middle = {UUID(told["session_id"]) for told in recorded.of_case("tools")}
    assert in_the_middle <= {row["session_id"] for row in moved}
