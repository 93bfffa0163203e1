"""What the log names is found wherever it stands, and nothing else counts as named."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Json

from dsec.platform.log_blobs import unnamed
from dsec.session.observations import reference
from dsec_contracts import encode
from dsec_contracts.keys import session_time

pytestmark = pytest.mark.postgres

SESSION = UUID("0192f0c1-2345-7abc-8def-0123456789ab")
ASIDE = {"verdict": "superseded", "kept_epoch": 1, "kept_sequence": 1, "kept_index": 0}


def key_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


@pytest.fixture
def log(log_url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    with psycopg.connect(log_url, autocommit=True) as connection:
        yield connection


def insert(
    log: psycopg.Connection[tuple[object, ...]], n: int, table: str = "event_log", **row: object
) -> None:
    """A row of a table of the log."""
    about = {
        "session_id": SESSION,
        "session_at": session_time(SESSION),
        "event_time": session_time(SESSION),
        "epoch": 1,
        "sequence": n,
        "index": 0,
        "version": 1,
        "key": f"key:{n}",
        "fact": encode({}),
        "event_id": str(n),
    }
    values = {**about, **(ASIDE if table == "event_aside" else {}), **row}
    names = ", ".join(f'"{name}"' for name in values)
    places = ", ".join(["%s"] * len(values))
    log.execute(f"insert into {table} ({names}) values ({places})", list(values.values()))  # type: ignore[call-overload]


async def test_a_blob_is_named_by_whatever_row_has_its_key(
    log: psycopg.Connection[tuple[object, ...]], log_url: str
) -> None:
    key = {name: key_of(name) for name in ("policy", "captured", "seen", "reset", "answers")}
    insert(log, 1, kind="policy.published", fact=encode({"blob": key["policy"]}))
    told = Json({"blob": key["captured"], "data": ""})
    insert(log, 2, kind="anchor.captured", circumstance=told)
    seen, reset = (reference(key[name], 1 << 40) for name in ("seen", "reset"))
    insert(log, 3, kind="session.stepped", step=0, observation=seen, reset_observation=reset)
    insert(log, 4, kind="reward.scored", step=0, extras=reference(key["answers"], 3))
    # Of kinds that are not known yet, in a run of digits that is longer than a key, put aside, and
    # in a message that nobody could read.
    key |= {name: key_of(name) for name in ("later", "run", "aside", "parked")}
    insert(log, 5, kind="moon.risen", fact=encode([{"deep": key["later"]}]))
    insert(log, 6, kind="moon.risen", fact=encode("00ab" + key["run"] + "9"))
    insert(log, 7, "event_aside", kind="tool.returned", fact=encode({"blob": key["aside"]}))
    log.execute(
        "insert into event_parked (epoch, sequence, subject, event_type, headers, body)"
        " values (1, 8, 's', 'moon.set.v9', '{}', %s)",
        [b'\xff{"blob": "%b"}' % key["parked"].encode()],
    )
    orphans = {key_of("orphan"), key_of("other")}
    assert await unnamed(log_url, {*key.values(), *orphans}) == orphans


async def test_observations_that_lie_in_their_rows_are_not_read(
    log: psycopg.Connection[tuple[object, ...]], log_url: str
) -> None:
    inline = encode(key_of("in a text") + "." * 200)
    insert(log, 1, kind="session.stepped", step=0, observation=inline)
    wanted = {key_of("in a text")}
    assert await unnamed(log_url, wanted) == wanted
    assert await unnamed(log_url, set()) == set()
