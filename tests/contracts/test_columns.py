"""Columns: whatever is in a message, its rows can be taken apart or it is refused."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dsec_contracts import RewardScored, SessionStepped, catalog
from dsec_contracts.columns import (
    ROWS_PER_MESSAGE_MAX,
    VarColumn,
    check_columns,
    check_flags,
    fixed_rows,
)
from dsec_contracts.step import StepColumns

WIDTHS = {
    "session_id": 16,
    "attempt": 4,
    "step": 4,
    "episode": 4,
    "env_reward": 8,
    "terminated": 1,
    "truncated": 1,
    "chain": 32,
}


def tick(rows: int) -> dict[str, Any]:
    row = {
        name: base64.urlsafe_b64encode(bytes(rows * width)).decode()
        for name, width in WIDTHS.items()
    }
    column = json.loads(VarColumn.pack([b"x"] * rows).model_dump_json())
    return {
        "rows": rows,
        "row": row | {name: column for name in StepColumns.model_fields if name not in WIDTHS},
    }


def parse(body: dict[str, Any]) -> SessionStepped:
    event = catalog.parse("session.stepped.v1", json.dumps(body).encode())
    assert isinstance(event, SessionStepped)
    return event


@given(st.lists(st.binary(max_size=40)))
def test_rows_survive_the_message(rows: list[bytes]) -> None:
    column = VarColumn.pack(rows)
    back = VarColumn.model_validate_json(column.model_dump_json())
    assert back.unpack() == rows
    assert len(back) == len(rows)
    assert back == column


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.binary(max_size=20))
def test_offsets_are_trusted_only_if_they_rise_to_the_end(ends: list[int], data: bytes) -> None:
    offsets = struct.pack(f"<{len(ends)}i", *ends)
    good = bool(ends) and ends[0] == 0 and ends[-1] == len(data) and ends == sorted(ends)
    try:
        column = VarColumn(offsets=offsets, data=data)
    except ValidationError:
        assert not good
    else:
        assert good
        assert b"".join(column.unpack()) == data


@given(st.binary(max_size=40), st.binary(max_size=10))
def test_any_bytes_as_offsets_do_no_harm(offsets: bytes, data: bytes) -> None:
    try:
        column = VarColumn(offsets=offsets, data=data)
    except ValidationError:
        return
    assert b"".join(column.unpack()) == data


@pytest.mark.parametrize("text", ["a", "_-9=", "AA=A", " AAA=", "AAA=\n", "ä", "AAAA" * 3 + "*"])
def test_bad_base64_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="base64"):
        VarColumn.model_validate_json(json.dumps({"offsets": "AAAAAA==", "data": text}))


@pytest.mark.parametrize("name", [*WIDTHS, "fact", "cause", "observation", "extras", "policy"])
def test_a_column_of_another_length_is_named(name: str) -> None:
    body = tick(3)
    body["row"][name] = tick(2)["row"][name]
    with pytest.raises(ValidationError, match=f"{name} has"):
        parse(body)


@pytest.mark.parametrize("rows", [-1, ROWS_PER_MESSAGE_MAX + 1, 2**70])
def test_the_number_of_rows_is_bounded(rows: int) -> None:
    with pytest.raises(ValidationError):
        parse({**tick(0), "rows": rows})
    with pytest.raises(ValueError, match="outside"):
        check_columns(rows, {}, {})


def test_no_rows_and_many_rows_are_fine() -> None:
    assert parse(tick(0)).rows == 0
    assert parse(tick(1000)).row.fact.unpack() == [b"x"] * 1000


def test_flags_are_0_or_1() -> None:
    check_flags(terminated=bytes([0, 1, 0]))
    with pytest.raises(ValueError, match="truncated has a byte"):
        check_flags(terminated=b"\0", truncated=b"\0\2\1")
    body = tick(2)
    body["row"]["terminated"] = base64.urlsafe_b64encode(b"\1\2").decode()
    with pytest.raises(ValidationError, match="terminated"):
        parse(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*WIDTHS, "fact", "cause"]), json_values)
@settings(max_examples=150)
def test_any_value_in_a_column_is_refused_in_good_order(name: str, value: Any) -> None:
    body = tick(2)
    body["row"][name] = value
    with pytest.raises(ValidationError):
        parse(body)


def test_fixed_rows() -> None:
    assert fixed_rows(b"aabbcc", 2) == [b"aa", b"bb", b"cc"]
    assert fixed_rows(b"", 16) == []


def test_only_ticks_of_lanes_are_columns() -> None:
    assert {e for e in catalog.EVENTS if e.columns} == {SessionStepped, RewardScored}
