"""Hot rows: from the columns of messages to Arrow, with no Python loop over rows.

Messages of one kind are joined column by column: fixed-width columns are concatenated bytes seen
through numpy, variable ones concatenated data with shifted offsets, and keys are made by Arrow's
own text functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dsec.recorder.rows import EPOCH_START, SCHEMA, Arrival, circumstance_json
from dsec_contracts import Event, RewardScored, SessionStepped
from dsec_contracts.columns import VarColumn

E = TypeVar("E", bound=Event)
_TIME = SCHEMA.field("session_at").type
_NUMBERS = {"<i2": pa.int16(), "<i4": pa.int32(), "<i8": pa.int64(), "<f8": pa.float64()}
_PREFIXES = {prefix: pa.scalar(prefix) for prefix in ("step:", "reward:")}
_DOT, _NOTHING = pa.scalar("."), pa.scalar("")
_ROUTING_AIDS: dict[str, Any] = {"reward_specs": {}, "deferrable": []}
"""What says where a row goes is not worth keeping; and what stands in its place."""


def step_table(arrivals: Sequence[Arrival], epoch: int) -> pa.Table:
    """The rows of `session.stepped` messages."""
    events = _events(arrivals, SessionStepped)
    parts = [event.row for event in events]
    step = _fixed(parts, "step", "<i4")
    columns = _shared(arrivals, [event.rows for event in events], epoch, parts)
    columns |= {
        "value": _numbers(_fixed(parts, "env_reward", "<f8")),
        "step": _numbers(step),
        "episode": _numbers(_fixed(parts, "episode", "<i4")),
        "attempt": _numbers(_fixed(parts, "attempt", "<i4")),
        "terminated": _flags(parts, "terminated"),
        "truncated": _flags(parts, "truncated"),
        "key": _key("step:", step),
        "chain": _variable_of_width(parts, "chain", 32),
    }
    columns |= {
        name: _variable(parts, name, empty_is_null=True)
        for name in ("observation", "reset_observation", "extras", "policy", "cause")
    }
    return _table(columns)


def reward_table(arrivals: Sequence[Arrival], epoch: int) -> pa.Table:
    """The rows of `reward.scored` messages. What caused a reward is the step it rewards."""
    events = _events(arrivals, RewardScored)
    parts = [event.row for event in events]
    step = _fixed(parts, "step", "<i4")
    columns = _shared(arrivals, [event.rows for event in events], epoch, parts)
    columns |= {
        "value": _numbers(_fixed(parts, "value", "<f8")),
        "step": _numbers(step),
        "key": _key("reward:", step, _fixed(parts, "revision", "<i4")),
        "cause": _as(_key("step:", step), pa.binary()),
        "extras": _responses(parts, [event.rows for event in events]),
    }
    return _table(columns)


TABLES: dict[type[Event], Callable[[Sequence[Arrival], int], pa.Table]] = {
    SessionStepped: step_table,
    RewardScored: reward_table,
}
"""The hot events and what makes their rows."""


def _events(arrivals: Sequence[Arrival], kind: type[E]) -> list[E]:
    found = [arrival.event for arrival in arrivals if isinstance(arrival.event, kind)]
    assert len(found) == len(arrivals)
    return found


def _shared(
    arrivals: Sequence[Arrival], rows: list[int], epoch: int, parts: Sequence[Any]
) -> dict[str, Any]:
    """The columns that every hot row has, whatever its kind."""
    total = sum(rows)
    first = np.cumsum([0, *rows[:-1]])
    index = np.arange(total, dtype="i4") - np.repeat(first.astype("i4"), rows)
    ids = b"".join([part.session_id for part in parts])
    event = arrivals[0].event
    times = np.array([_microseconds(a.envelope.time) for a in arrivals], "i8")
    sequences = np.array([a.sequence for a in arrivals], "i8")
    return {
        "session_id": _array(SCHEMA.field("session_id").type, total, ids),
        "session_at": _array(_TIME, total, _session_microseconds(ids)),
        "sequence": _numbers(np.repeat(sequences, rows)),
        "event_time": _array(_TIME, total, np.repeat(times, rows)),
        "epoch": _numbers(np.full(total, epoch, "i4")),
        "index": _numbers(index),
        "version": _numbers(np.full(total, event.version, "i2")),
        "kind": _texts([event.event_name()], [total]),
        "fact": _variable(parts, "fact", empty_is_null=False),
        "circumstance": _on_first_row(arrivals, rows, first),
        "event_id": _texts([a.envelope.id for a in arrivals], rows),
    }


def _on_first_row(
    arrivals: Sequence[Arrival], rows: list[int], first: npt.NDArray[Any]
) -> pa.Array:
    """The circumstance of each message on its first row alone: it is the same for all its rows,
    and would be larger than most of them. What only routes the message is left out."""
    total = sum(rows)
    texts = [
        circumstance_json(_without_routing(getattr(a.event, "circumstance", None))).encode()
        if n
        else b""
        for a, n in zip(arrivals, rows, strict=True)
    ]
    lengths = np.zeros(total, "i4")
    filled = np.array(rows) > 0
    lengths[first[filled]] = [len(text) for text in texts if text]
    return _binary(pa.string(), lengths, b"".join(texts), empty_is_null=True)


def _without_routing(circumstance: Any) -> Any:
    names = _ROUTING_AIDS.keys() & type(circumstance).model_fields.keys()
    return circumstance.model_copy(update={name: _ROUTING_AIDS[name] for name in names})


def _microseconds(time: datetime) -> int:
    delta = time.astimezone(UTC) - EPOCH_START
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def _session_microseconds(ids: bytes) -> npt.NDArray[np.int64]:
    """The times in session ids: 48 bits of milliseconds, big-endian, at their head."""
    heads = np.frombuffer(ids, "u1").reshape(-1, 16)[:, :6]
    words = np.zeros((len(heads), 8), "u1")
    words[:, 2:] = heads
    return words.view(">i8").reshape(-1).astype("i8") * 1000


# Arrays are made from buffers and not by `pa.array`, which looks for pandas at each call and, where
# there is none, searches the whole path for it: that took longer than all the rest.


def _array(kind: pa.DataType, rows: int, data: Any) -> pa.Array:
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(data)])


def _numbers(values: npt.NDArray[Any]) -> pa.Array:
    return _array(_NUMBERS[values.dtype.str], len(values), values)


def _flags(parts: Sequence[Any], name: str) -> pa.Array:
    flags = _fixed(parts, name, "u1")
    return _array(pa.bool_(), len(flags), np.packbits(flags, bitorder="little"))


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The same buffers under another type of the same layout."""
    return pa.Array.from_buffers(kind, len(array), array.buffers())


def _texts(texts: Sequence[str], rows: Sequence[int]) -> pa.Array:
    """Each text on so many rows."""
    encoded = [text.encode() for text in texts]
    lengths = np.repeat(np.array([len(text) for text in encoded], "i4"), rows)
    data = b"".join([text * n for text, n in zip(encoded, rows, strict=True)])
    return _binary(pa.string(), lengths, data, empty_is_null=False)


def _fixed(parts: Sequence[Any], name: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(b"".join([getattr(part, name) for part in parts]), dtype)


def _variable_of_width(parts: Sequence[Any], name: str, width_bytes: int) -> pa.Array:
    data = b"".join([getattr(part, name) for part in parts])
    lengths = np.full(len(data) // width_bytes, width_bytes, "i4")
    return _binary(pa.binary(), lengths, data, empty_is_null=False)


def _variable(parts: Sequence[Any], name: str, *, empty_is_null: bool) -> pa.Array:
    return _joined([getattr(part, name) for part in parts], empty_is_null=empty_is_null)


def _joined(columns: Sequence[VarColumn], *, empty_is_null: bool) -> pa.Array:
    lengths = np.concatenate([np.diff(np.frombuffer(c.offsets, "<i4")) for c in columns])
    data = b"".join([c.data for c in columns])
    if empty_is_null and not data:
        return pa.nulls(len(lengths), pa.binary())
    return _binary(pa.binary(), lengths, data, empty_is_null=empty_is_null)


def _responses(parts: Sequence[Any], rows: list[int]) -> pa.Array:
    """What services answered; null on the rows of messages that say nothing of it."""
    if all(part.responses is None for part in parts):
        return pa.nulls(sum(rows), pa.binary())
    columns = [
        part.responses or VarColumn.pack([b""] * n) for part, n in zip(parts, rows, strict=True)
    ]
    return _joined(columns, empty_is_null=True)


def _binary(
    kind: pa.DataType, lengths: npt.NDArray[Any], data: bytes, *, empty_is_null: bool
) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, "i4")
    np.cumsum(lengths, out=offsets[1:])
    present = pa.py_buffer(np.packbits(lengths > 0, bitorder="little")) if empty_is_null else None
    buffers = [present, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(lengths), buffers)


def _key(prefix: str, *ordinals: npt.NDArray[Any]) -> pa.Array:
    texts = [_numbers(n).cast(pa.string()) for n in ordinals]
    joined = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, _DOT)
    return pc.binary_join_element_wise(_PREFIXES[prefix], joined, _NOTHING)


def _table(columns: dict[str, Any]) -> pa.Table:
    rows = len(columns["session_id"])
    arrays = [
        columns[field.name] if field.name in columns else pa.nulls(rows, field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(
        [a.cast(f.type) if a.type != f.type else a for a, f in zip(arrays, SCHEMA, strict=True)],
        schema=SCHEMA,
    )
