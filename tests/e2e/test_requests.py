"""Asking for sessions: what is refused says why and which field; nothing is lost."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
import uuid_utils

from dsec.client.client import Client
from dsec_contracts import BY_TYPE

pytestmark = pytest.mark.stack


def uuid7() -> str:
    return str(uuid_utils.uuid7())


async def publish(stack: Any, event_type: str, key: str, body: bytes) -> str:
    """Publish bare bytes with CloudEvents headers, as another system would."""
    event_id = uuid.uuid4().hex
    name = event_type.rpartition(".")[0]
    connection = await nats.connect(stack.nats_url_of("dsec"))  # a client may not send all of it
    try:
        await connection.jetstream().publish(
            f"dsec.{name}.{key}",
            body,
            headers={
                "ce-specversion": "1.0",
                "ce-id": event_id,
                "ce-type": event_type,
                "ce-source": "test",
                "ce-time": datetime.now(UTC).isoformat(),
                "Nats-Msg-Id": event_id,
            },
        )
    finally:
        await connection.close()
    return event_id


async def rejection(stack: Any, event_id: str) -> dict[str, Any]:
    """The rejection of an event, once it is in the log."""

    def found() -> Any:
        return stack.sql(
            "select fact_json as fact from event_log where kind = 'session.rejected' "
            "and key = %(key)s",
            key=f"rejected:{event_id}",
        )

    rows = await asyncio.to_thread(stack.until, found)
    return dict(rows[0]["fact"])


@pytest.fixture
async def hashes(
    client: Client, session_files: Callable[..., Path], good_agent: str
) -> dict[str, str]:
    """Registered specs."""
    folder = session_files(good_agent).parent
    return {
        "agent_spec": await client.register("agent", folder / "agent_spec.yaml"),
        "env_spec": await client.register("env", folder / "env_spec.yaml"),
        "reward_fn_hash": await client.register("reward", "env"),
    }


def fact(hashes: dict[str, str], **changes: Any) -> bytes:
    value = {
        "session_id": uuid7(),
        **hashes,
        "seed": 7,
        "max_steps": 20,
        "creation_timestamp": datetime.now(UTC).isoformat(),
        **changes,
    }
    return json.dumps({"fact": value}).encode()


async def test_a_bare_request_runs(stack: Any, hashes: dict[str, str]) -> None:
    session_id = uuid7()
    await publish(stack, "session.requested.v1", session_id, fact(hashes, session_id=session_id))
    query = "select status, steps from session_summary where session_id = %(id)s"

    def ended() -> Any:
        rows = stack.sql(query, id=session_id)
        return rows if rows and rows[0]["status"] == "completed" else None

    rows = await asyncio.to_thread(stack.until, ended)
    assert rows[0]["steps"] == 20


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"seed": -1}, "malformed", "fact.seed"),
        ({"seed": 2**63}, "malformed", "fact.seed"),
        ({"max_steps": 0}, "malformed", "fact.max_steps"),
        ({"max_steps": "many"}, "malformed", "fact.max_steps"),
        ({"session_id": str(uuid.uuid4())}, "malformed", "fact.session_id"),
        ({"session_id": "no id"}, "malformed", "fact.session_id"),
        ({"agent_spec": "0" * 64}, "unregistered_spec", "agent_spec"),
        ({"env_spec": "0" * 64}, "unregistered_spec", "env_spec"),
        ({"reward_fn_hash": "f" * 64}, "unregistered_spec", "reward_fn_hash"),
        ({"policy": "none@0"}, "unregistered_policy", "policy"),
        ({"fork_parent": "x"}, "not_implemented", "fork_parent"),
    ],
)
async def test_a_bad_request_is_rejected_by_field(
    stack: Any, hashes: dict[str, str], changes: dict[str, Any], code: str, field: str
) -> None:
    event_id = await publish(stack, "session.requested.v1", uuid7(), fact(hashes, **changes))
    found = await rejection(stack, event_id)
    assert (found["code"], found["field"]) == (code, field)


async def test_an_id_decades_away_is_rejected(stack: Any, hashes: dict[str, str]) -> None:
    far = int((datetime.now(UTC) + timedelta(days=20_000)).timestamp() * 1000)
    session_id = str(uuid.UUID(int=(far << 80) | (7 << 76) | (2 << 62) | 1))
    body = fact(hashes, session_id=session_id)
    event_id = await publish(stack, "session.requested.v1", session_id, body)
    found = await rejection(stack, event_id)
    assert (found["code"], found["field"]) == ("id_out_of_window", "session_id")


async def test_an_id_with_other_facts_is_rejected_under_the_event(
    stack: Any, hashes: dict[str, str]
) -> None:
    session_id = uuid7()
    at = datetime.now(UTC).isoformat()
    first = fact(hashes, session_id=session_id, creation_timestamp=at)
    other = fact(hashes, session_id=session_id, creation_timestamp=at, seed=8)
    await publish(stack, "session.requested.v1", session_id, first)
    await publish(stack, "session.requested.v1", session_id, first)  # the same again: nothing
    event_id = await publish(stack, "session.requested.v1", session_id, other)
    found = await rejection(stack, event_id)
    assert (found["code"], found["session_id"]) == ("id_in_use", session_id)
    rows = stack.sql("select seed from session_summary where session_id = %(id)s", id=session_id)
    assert [row["seed"] for row in rows] == [7]


async def test_malformed_events_on_every_subject_harm_nobody(
    stack: Any, client: Client, hashes: dict[str, str]
) -> None:
    for event_type, event in BY_TYPE.items():
        if not event.durable:
            continue
        for body in (b"", b"{", b"[]", b'{"fact": 1}', b"\xff\x00", b'{"rows": -1, "row": {}}'):
            await publish(stack, event_type, uuid7(), body)
    session_id = uuid7()
    body = fact(hashes, session_id=session_id)
    await publish(stack, "session.requested.v1", session_id, body)
    query = "select status from session_summary where session_id = %(id)s"

    def completed() -> bool:
        rows = stack.sql(query, id=session_id)
        return bool(rows) and rows[0]["status"] == "completed"

    await asyncio.to_thread(stack.until, completed)


async def test_cancel(
    stack: Any, client: Client, session_files: Callable[..., Path], good_agent: str
) -> None:
    group = await client.request(session_files(good_agent, max_steps=10**8), count=3)

    def all_step() -> bool:
        query = (
            "select count(distinct session_id) as n from event_log "
            "where kind = 'session.stepped' and session_id = any(%(ids)s)"
        )
        [row] = stack.sql(query, ids=list(group.session_ids))
        return bool(row["n"] == 3)

    await asyncio.to_thread(stack.until, all_step)
    await client.cancel(group.session_ids)
    async with asyncio.timeout(90):
        rows = await client.wait(group)
    assert {(row.status, row.code) for row in rows} == {("cancelled", "cancelled")}
    assert all(row.steps > 0 for row in rows)


async def test_deadline(
    client: Client, session_files: Callable[..., Path], good_agent: str
) -> None:
    session = session_files(good_agent, max_steps=10**8)
    session.write_text(session.read_text() + "deadline_s: 2\n")
    group = await client.request(session)
    async with asyncio.timeout(90):
        [row] = await client.wait(group)
    assert (row.status, row.code) == ("cancelled", "deadline")


async def test_an_unknown_environment_fails_with_its_field(
    client: Client, stack: Any, hashes: dict[str, str]
) -> None:
    from dsec.session.documents import EnvDocument, seal
    from dsec_contracts import SpecRegistered

    spec_hash, content = seal("env", EnvDocument(entry="gymnasium:NoSuchThing-v0"), {})
    event = SpecRegistered.model_validate(
        {"fact": {"spec_hash": spec_hash, "kind": "env", "content": content}}
    )
    await publish(stack, "spec.registered.v1", spec_hash, event.body())
    session_id = uuid7()
    body = fact({**hashes, "env_spec": spec_hash}, session_id=session_id)
    await publish(stack, "session.requested.v1", session_id, body)
    query = (
        "select fact_json ->> 'code' as code, circumstance ->> 'message' as message "
        "from event_log where session_id = %(id)s and kind = 'session.ended'"
    )
    [row] = await asyncio.to_thread(stack.until, lambda: stack.sql(query, id=session_id))
    assert row["code"] == "unknown_environment"
    assert "env_spec.entry" in row["message"]
