"""What a message turns out to be: rows, a type to park, or nothing that can ever be a row. Pure.

Everything that can be wrong with one message is found here, message by message, so that a table
of many is never refused by our own code for one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dsec.platform.bus import BadMessage, Message
from dsec.recorder.columns import TABLES
from dsec.recorder.rows import SCHEMA, Arrival, Parked, cold_row
from dsec_contracts import Event, UnknownEvent, subjects

UNFIT = (BadMessage, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""How a message's own data fails on the way to a row. Anything else is a fault of ours."""


@dataclass(frozen=True, slots=True)
class Cold:
    """A message that is one row."""

    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Hot:
    """A message that is many rows."""

    arrival: Arrival
    epoch: int


@dataclass(frozen=True, slots=True)
class Unfit:
    """A message that can never be a row, and why."""

    error: str


Reading = Cold | Hot | Parked | Unfit


def read(message: Message, epoch: int) -> Reading:
    """What a message turns out to be."""
    try:
        envelope = message.envelope()
        try:
            event = message.event()
        except UnknownEvent:
            return park(message, envelope.type)
        # What is on another event's subject is nobody's, here as for every other service.
        if not message.subject.startswith(subjects.start(event.event_name())):
            raise BadMessage(f"a {event.event_type()} on {message.subject}")
        arrival = Arrival(message.sequence, envelope, event)
        if type(event) in TABLES:
            return Hot(arrival, epoch)
        return Cold(cold_row(arrival, epoch))
    except UNFIT as error:
        return Unfit(f"{type(error).__name__}: {error}")


def alone(reading: Reading) -> Reading:
    """A reading whose rows no table takes is unfit. For when a table of many was refused: tried
    alone, each costs fifty times what it costs among others."""
    try:
        table_of([reading])
    except UNFIT as error:
        return Unfit(f"{type(error).__name__}: {error}")
    return reading


def park(message: Message, event_type: str) -> Parked:
    """Everything about a message, to be read again by a newer version."""
    return Parked(
        message.sequence, message.subject, event_type, headers_json(message.headers), message.data
    )


def headers_json(headers: Mapping[str, str]) -> str:
    """Headers as JSON in ASCII."""
    return json.dumps(dict(headers))


def table_of(readings: Sequence[Reading]) -> pa.Table:
    """The rows of a batch, in the columns of `event_log`, in no particular order."""
    tables = []
    cold = [reading.row for reading in readings if isinstance(reading, Cold)]
    if cold:
        tables.append(pa.Table.from_pylist(cold, schema=SCHEMA))
    by_kind: dict[tuple[type[Event], int], list[Arrival]] = {}
    for reading in readings:
        if isinstance(reading, Hot):
            kind = type(reading.arrival.event), reading.epoch
            by_kind.setdefault(kind, []).append(reading.arrival)
    tables += [TABLES[kind](arrivals, epoch) for (kind, epoch), arrivals in by_kind.items()]
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table()
