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
_MICROSECOND = np.timedelta64(1, "us")
_ROUTING_AIDS = {"reward_specs"}


def step_table(arrivals: Sequence[Arrival], epoch: int) -> pa.Table:
    """The rows of `session.stepped` messages."""
    events = _events(arrivals, SessionStepped)
    parts = [event.row for event in events]
    step = _fixed(parts, "step", "<i4")
    columns = _shared(arrivals, [event.rows for event in events], epoch, parts)
    columns |= {
        "value": pa.array(_fixed(parts, "env_reward", "<f8")),
        "step": pa.array(step),
        "episode": pa.array(_fixed(parts, "episode", "<i4")),
        "attempt": pa.array(_fixed(parts, "attempt", "<i4")),
        "terminated": pa.array(_fixed(parts, "terminated", "u1") != 0),
        "truncated": pa.array(_fixed(parts, "truncated", "u1") != 0),
        "key": _key("step:", step),
        "chain": _wide(parts, "chain", 32),
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
        "value": pa.array(_fixed(parts, "value", "<f8")),
        "step": pa.array(step),
        "key": _key("reward:", step, _fixed(parts, "revision", "<i4")),
        "cause": _key("step:", step).cast(pa.binary()),
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
    index = np.arange(total, dtype=np.int64) - np.repeat(first, rows)
    ids = b"".join(part.session_id for part in parts)
    event = arrivals[0].event
    times = np.array([_microseconds(a.envelope.time) for a in arrivals], "i8")
    return {
        "session_id": pa.Array.from_buffers(pa.binary(16), total, [None, pa.py_buffer(ids)]),
        "session_at": _time(_session_microseconds(ids)),
        "sequence": pa.array(np.repeat(np.array([a.sequence for a in arrivals], "i8"), rows)),
        "event_time": _time(np.repeat(times, rows)),
        "epoch": pa.array(np.full(total, epoch, "i4")),
        "index": pa.array(index.astype("i4")),
        "version": pa.array(np.full(total, event.version, "i2")),
        "kind": pa.repeat(pa.scalar(event.event_name()), total),
        "fact": _variable(parts, "fact", empty_is_null=False),
        "circumstance": _on_first_row(arrivals, rows, first),
        "event_id": pa.array([a.envelope.id for a in arrivals]).take(
            pa.array(np.repeat(np.arange(len(rows)), rows))
        ),
    }


def _on_first_row(
    arrivals: Sequence[Arrival], rows: list[int], first: npt.NDArray[Any]
) -> pa.Array:
    """The circumstance of each message on its first row alone: it is the same for all its rows,
    and would be larger than most of them. What only routes the message is left out."""
    texts = pa.array(
        [
            circumstance_json(_without_routing(getattr(a.event, "circumstance", None)))
            for a in arrivals
        ]
    )
    which = np.full(sum(rows), -1, "i8")
    filled = np.array(rows) > 0
    which[first[filled]] = np.arange(len(rows))[filled]
    return texts.take(pa.array(which, mask=which < 0))


def _without_routing(circumstance: Any) -> Any:
    return circumstance.model_copy(
        update={name: {} for name in _ROUTING_AIDS & set(type(circumstance).model_fields)}
    )


def _microseconds(time: datetime) -> int:
    delta = time.astimezone(UTC) - EPOCH_START
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def _session_microseconds(ids: bytes) -> npt.NDArray[np.int64]:
    """The times in session ids: 48 bits of milliseconds, big-endian, at their head."""
    heads = np.frombuffer(ids, "u1").reshape(-1, 16)[:, :6]
    words = np.zeros((len(heads), 8), "u1")
    words[:, 2:] = heads
    return words.view(">i8").reshape(-1).astype("i8") * 1000


def _time(microseconds: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(microseconds).cast(pa.timestamp("us", tz="UTC"))


def _fixed(parts: Sequence[Any], name: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(b"".join(getattr(part, name) for part in parts), dtype)


def _wide(parts: Sequence[Any], name: str, width_bytes: int) -> pa.Array:
    data = b"".join(getattr(part, name) for part in parts)
    return pa.Array.from_buffers(
        pa.binary(width_bytes), len(data) // width_bytes, [None, pa.py_buffer(data)]
    )


def _variable(parts: Sequence[Any], name: str, *, empty_is_null: bool) -> pa.Array:
    columns: list[VarColumn] = [getattr(part, name) for part in parts]
    lengths = np.concatenate([np.diff(np.frombuffer(c.offsets, "<i4")) for c in columns])
    offsets = np.zeros(len(lengths) + 1, "i4")
    np.cumsum(lengths, out=offsets[1:])
    data = b"".join(c.data for c in columns)
    present = None
    if empty_is_null:
        present = pa.py_buffer(np.packbits(lengths > 0, bitorder="little").tobytes())
    buffers = [present, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)


def _key(prefix: str, *ordinals: npt.NDArray[Any]) -> pa.Array:
    texts = [pa.array(n).cast(pa.string()) for n in ordinals]
    joined = texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, ".")
    return pc.binary_join_element_wise(prefix, joined, "")


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
