"""Rows without a server: keys, columns, and JSON that PostgreSQL takes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, get_args
from uuid import UUID

import pyarrow as pa
import pytest

from dsec.platform.bus import Message
from dsec.platform.schema import ROW_COLUMNS, event_log
from dsec.recorder.columns import TABLES
from dsec.recorder.intake import Cold, Hot, Reading, Unfit, read, table_of
from dsec.recorder.rows import SCHEMA, Parked, natural_key, query_json, session_of
from dsec_contracts import (
    EVENTS,
    SYSTEM_SESSION,
    Envelope,
    Event,
    RewardMissing,
    SessionRejected,
    canonical,
    subjects,
)
from dsec_contracts.columns import VarColumn
from dsec_contracts.keys import session_time
from dsec_contracts.reward import RewardMissingCircumstance, RewardNoticeFact
from dsec_contracts.session import RejectFact

NOW = datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=UTC)


def message(event: Event, sequence: int = 1, headers: dict[str, str] | None = None) -> Message:
    found = Envelope(f"e{sequence}", event.event_type(), "test", NOW).headers() | (headers or {})
    raw: Any = None
    subject = subjects.subject(event.event_name(), "x")
    return Message(subject, found, event.body(), sequence, 1, NOW, raw)


def test_the_columns_are_those_of_the_table() -> None:
    assert tuple(SCHEMA.names) == ROW_COLUMNS == tuple(event_log.columns.keys())


def test_every_durable_event_has_a_way_into_the_log(make: Any) -> None:
    sid = make.new_session()
    for event in EVENTS:
        if not event.durable:
            continue
        if event.columns:
            assert event in TABLES
            continue
        fact = event.model_fields["fact"].annotation
        assert fact is not None
        values = {name: _some(field.annotation, sid) for name, field in fact.model_fields.items()}
        made = event.model_construct(fact=fact.model_construct(**values))
        assert natural_key(made), event
        assert session_of(made) in (sid, SYSTEM_SESSION)


def _some(annotation: Any, sid: UUID) -> Any:
    if annotation is UUID or UUID in get_args(annotation):
        return sid
    return 1 if annotation is int or int in get_args(annotation) else "x"


def test_a_rejection_is_never_logged_under_the_session_it_names(make: Any) -> None:
    fact = RejectFact(event_id="e1", code="id_in_use", session_id=str(make.new_session()))
    assert session_of(SessionRejected(fact=fact)) == SYSTEM_SESSION


def test_hot_columns_equal_a_loop_over_rows(make: Any) -> None:
    ids = [make.new_session() for _ in range(3)]
    first = make.stepped(ids, [0, 5, 70], [1.0, -0.0, float("inf")], observations=[b"", b"o", b""])
    second = make.stepped(ids[:1], [1], [2.0], causes=[b""])
    nothing = make.stepped([], [])
    readings = [read(message(e, n), 9) for n, e in enumerate([nothing, first, second], 1)]
    rows = table_of(readings).to_pylist()
    assert [r["key"] for r in rows] == ["step:0", "step:5", "step:70", "step:1"]
    assert [(r["sequence"], r["index"]) for r in rows] == [(2, 0), (2, 1), (2, 2), (3, 0)]
    assert [r["session_id"] for r in rows] == [i.bytes for i in [*ids, ids[0]]]
    assert [r["session_at"] for r in rows] == [session_time(i) for i in [*ids, ids[0]]]
    assert [r["fact"] for r in rows] == first.row.fact.unpack() + second.row.fact.unpack()
    assert [str(r["value"]) for r in rows] == ["1.0", "-0.0", "inf", "2.0"]
    assert [r["observation"] for r in rows] == [None, b"o", None, None]
    assert [r["cause"] for r in rows] == [b"started", b"started", b"started", None]
    assert {(r["epoch"], r["version"], r["kind"], r["event_time"]) for r in rows} == {
        (9, 1, "session.stepped", NOW)
    }
    assert [r["event_id"] for r in rows] == ["e2", "e2", "e2", "e3"]
    circumstances = [r["circumstance"] for r in rows]
    assert json.loads(circumstances[0])["lane"] == "l1"
    assert "x" not in json.loads(circumstances[0])["reward_specs"]
    assert circumstances[1:3] == [None, None]
    assert circumstances[3] is not None


def test_keys_of_rewards_carry_their_revision(make: Any) -> None:
    sid = make.new_session()
    table = table_of([read(message(make.scored([sid, sid], [3, 12], [1.0, 2.0], 2)), 1)])
    assert table["key"].to_pylist() == ["reward:3.2", "reward:12.2"]
    assert table["cause"].to_pylist() == [b"step:3", b"step:12"]


def test_no_messages_are_an_empty_table() -> None:
    assert table_of([]).schema == SCHEMA
    assert isinstance(table_of([]), pa.Table)


def test_a_cause_of_the_same_session_is_its_key_alone(make: Any) -> None:
    sid, other = make.new_session(), make.new_session()
    for cause, expected in (
        (f"{sid}/requested", b"requested"),
        (f"{other}/ended", f"{other}/ended".encode()),
    ):
        found = read(message(make.placed(sid), headers={"ce-causationid": cause}), 1)
        assert isinstance(found, Cold)
        assert found.row["cause"] == expected


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({"ce-type": ""}, Unfit),
        ({"ce-time": "yesterday"}, Unfit),
        ({"ce-time": "2026-01-01T00:00:00"}, Unfit),
        ({"ce-id": "caf\u00e9"}, Unfit),
        ({"ce-causationid": "a\0b"}, Unfit),
        ({"ce-type": "worker.heartbeat.v1"}, Unfit),
        ({"ce-type": "session.requested.v7"}, Parked),
        ({}, Cold),
    ],
)
def test_what_a_message_turns_out_to_be(
    headers: dict[str, str], kind: type[Any], make: Any
) -> None:
    assert isinstance(read(message(make.requested(make.new_session()), headers=headers), 1), kind)


def test_what_is_on_another_events_subject_is_unfit(make: Any) -> None:
    event = message(make.requested(make.new_session()))
    event.subject = "dsec.session.stepped.k"
    found = read(event, 1)
    assert isinstance(found, Unfit)
    assert "session.requested.v1 on dsec.session.stepped.k" in found.error


@pytest.mark.parametrize(
    ("event", "old", "new"),
    [
        ("placed", b'"attempt":1', b'"attempt":1099511627776'),
        ("missing", b'"step":7', b'"step":1099511627776'),
        ("started", b'"attempt":1', b'"attempt":1180591620717411303424'),
    ],
)
def test_a_number_that_no_column_holds_is_unfit(
    event: str, old: bytes, new: bytes, make: Any
) -> None:
    sid = make.new_session()
    missing = RewardMissing(fact=RewardNoticeFact(session_id=sid, step=7, code="x"))
    made = missing if event == "missing" else getattr(make, event)(sid)
    sent = message(made)
    assert old in sent.data
    sent.data = sent.data.replace(old, new)
    assert isinstance(read(sent, 1), Unfit)


def test_a_body_nested_without_end_is_unfit(make: Any) -> None:
    event = message(make.requested(make.new_session()))
    event.data = event.data.replace(
        b'"labels":{', b'"extra":' + b"[" * 100 + b"]" * 100 + b',"labels":{'
    )
    assert isinstance(read(event, 1), Unfit)


def test_facts_are_the_canonical_bytes_of_all_fields(make: Any) -> None:
    event = message(make.requested(make.new_session()))
    event.data = event.data.replace(b'"labels":{', b'"newer":{"x":NaN,"y":1e16},"labels":{')
    found = read(event, 1)
    assert isinstance(found, Cold)
    decoded = canonical.decode(found.row["fact"])
    assert str(decoded["newer"]) == "{'x': nan, 'y': 1e+16}"
    assert json.loads(found.row["fact_json"])["newer"] == {"x": "nan", "y": 1e16}


def test_json_for_queries_has_no_nul_no_nan_and_no_long_text() -> None:
    value = {"a\0": ["\0", float("-inf"), "x" * 5000, {"b": None}], "n": 2**70, "s": "\ud800"}
    text = query_json(value)
    assert "\\u0000" not in text
    assert text.isascii()
    assert json.loads(text)["n"] == 2**70
    assert json.loads(text)["a\N{SYMBOL FOR NULL}"] == [
        "\N{SYMBOL FOR NULL}",
        "-inf",
        None,
        {"b": None},
    ]


def test_a_hot_reading_is_not_a_row_yet(make: Any) -> None:
    found: Reading = read(message(make.stepped([make.new_session()], [0])), 1)
    assert isinstance(found, Hot)


def test_what_services_answered_lies_beside_its_reward(make: Any) -> None:
    sid = make.new_session()
    plain, asking = (make.scored([sid, sid], [n, n + 1], [1.0, 2.0], 1) for n in (0, 2))
    responses = VarColumn.pack([b"", b"answers"])
    row = asking.row.model_copy(update={"responses": responses})
    asking = asking.model_copy(update={"row": row})
    table = table_of([read(message(event, n), 1) for n, event in enumerate([plain, asking], 1)])
    assert table["extras"].to_pylist() == [None, None, None, b"answers"]
    assert table_of([read(message(plain), 1)])["extras"].to_pylist() == [None, None]


def test_what_services_answered_before_a_reward_went_missing_is_beside_it_once(make: Any) -> None:
    told = RewardMissingCircumstance(message="m", responses=b"answers")
    fact = RewardNoticeFact(session_id=make.new_session(), step=7, code="reward_raised")
    arrival = read(message(RewardMissing(fact=fact, circumstance=told)), 1)
    assert isinstance(arrival, Cold)
    row = arrival.row
    assert row["extras"] == b"answers"
    assert "responses" not in json.loads(row["circumstance"])
