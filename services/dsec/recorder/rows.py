"""From messages to rows of the log. Pure: no clock, no I/O.

A batch becomes one Arrow table in the columns of `event_log`. Cold events come row by row from
here; hot ones stay columns all the way (`columns.py`). Facts are passed through or encoded
canonically; the JSON beside them is for queries and carries what JSON can.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pyarrow as pa

from dsec_contracts import (
    SYSTEM_SESSION,
    AnchorCaptured,
    AnchorLost,
    AnchorStored,
    CurriculumChanged,
    Envelope,
    Event,
    PolicyPublished,
    PolicySanityChecked,
    RewardDeferred,
    RewardMissing,
    RewardRescored,
    RewardRescoreRequested,
    ServiceDeclared,
    ServiceModeChanged,
    SessionCancelRequested,
    SessionEnded,
    SessionPlaced,
    SessionRejected,
    SessionReleased,
    SessionRequested,
    SessionResumed,
    SessionStarted,
    SpecRegistered,
    ToolBegun,
    ToolCalled,
    ToolFailed,
    ToolRetried,
    ToolReturned,
    WorkerFenced,
    canonical,
    keys,
)

FACT_JSON_TEXT_CHARS_MAX = 4096
"""Longer texts (sources, weights) are left out of the JSON that goes beside a fact."""

EPOCH_START = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        ("session_id", pa.binary(16)),
        ("session_at", _TIME),
        ("sequence", pa.int64()),
        ("value", pa.float64()),
        ("event_time", _TIME),
        ("epoch", pa.int32()),
        ("index", pa.int32()),
        ("step", pa.int32()),
        ("episode", pa.int32()),
        ("attempt", pa.int32()),
        ("version", pa.int16()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("kind", pa.string()),
        ("key", pa.string()),
        ("chain", pa.binary()),
        ("fact", pa.binary()),
        ("observation", pa.binary()),
        ("reset_observation", pa.binary()),
        ("extras", pa.binary()),
        ("policy", pa.binary()),
        ("cause", pa.binary()),
        ("circumstance", pa.string()),
        ("fact_json", pa.string()),
        ("event_id", pa.string()),
    ]
)
"""The columns of `event_log`, in its order. Texts that come as bytes are bytes here: the server
checks that they are UTF-8."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that is an event, and where it stands in the stream."""

    sequence: int
    envelope: Envelope
    event: Event


@dataclass(frozen=True, slots=True)
class Parked:
    """A message of a type that this version does not know."""

    sequence: int
    subject: str
    event_type: str
    headers_json: str
    body: bytes


def natural_key(event: Event) -> str:
    """The key of a cold event within its session.

    Raises:
        TypeError: the event is hot (its rows have keys of their own) or is not logged.
    """
    match event:
        case SessionRequested():
            return keys.REQUESTED
        case SessionCancelRequested():
            return keys.CANCEL_REQUESTED
        case SessionPlaced():
            return keys.placed(event.fact.attempt)
        case SessionStarted():
            return keys.STARTED
        case SessionReleased():
            return keys.released(event.fact.attempt)
        case SessionResumed():
            return keys.resumed(event.fact.attempt)
        case SessionEnded():
            return keys.ENDED
        case SessionRejected():
            return keys.rejected(event.fact.event_id)
        case RewardDeferred():
            return keys.reward_deferred(event.fact.step)
        case RewardMissing():
            return keys.reward_missing(event.fact.step)
        case RewardRescoreRequested():
            return keys.rescore_requested(event.fact.revision)
        case RewardRescored():
            return keys.rescored(event.fact.revision)
        case ToolCalled():
            return keys.tool_call(event.fact.step, event.fact.turn)
        case ToolBegun(fact=call):
            return keys.tool_begun(call.step, call.turn, call.index)
        case ToolRetried(fact=call):
            return keys.tool_retried(call.step, call.turn, call.index, call.attempt)
        case ToolReturned(fact=call) | ToolFailed(fact=call):
            return keys.tool_result(call.step, call.turn, call.index)
        case CurriculumChanged():
            return keys.curriculum(event.fact.n)
        case AnchorCaptured():
            return keys.anchor(event.fact.position)
        case AnchorStored() | AnchorLost():
            return keys.anchor_result(event.fact.position)
        case PolicySanityChecked():
            return keys.SANITY_CHECKED
        case SpecRegistered():
            return keys.spec(event.fact.spec_hash)
        case PolicyPublished():
            return keys.policy(event.fact.name, event.fact.version)
        case ServiceDeclared():
            return keys.service(event.fact.name, event.fact.version)
        case ServiceModeChanged():
            return keys.service_mode(event.fact.name, event.fact.since_ms)
        case WorkerFenced():
            return keys.fenced(event.fact.worker)
    raise TypeError(f"{type(event).__name__} has no natural key of its own")


def session_of(event: Event) -> UUID:
    """The session that a cold event is logged under."""
    if isinstance(event, SessionRejected):
        return SYSTEM_SESSION  # the id it names is as somebody wrote it, and may be another's
    found = getattr(getattr(event, "fact", None), "session_id", None)
    return found if isinstance(found, UUID) else SYSTEM_SESSION


def cause_key(envelope: Envelope, session_id: UUID) -> str | None:
    """The cause's key within the session, or `<session id>/<key>` for another session's."""
    cause = envelope.causationid
    return cause.removeprefix(f"{session_id}/") if cause else None


def cold_row(arrival: Arrival, epoch: int) -> dict[str, Any]:
    """The one row of a cold event.

    Raises:
        ValueError, TypeError: the event cannot be a row.
    """
    event, envelope = arrival.event, arrival.envelope
    session_id = session_of(event)
    fact = event.fact_value()
    circumstance = getattr(event, "circumstance", None)
    if isinstance(event, AnchorCaptured):
        # The blob is on its way to the object store; the log keeps its name.
        circumstance = event.circumstance.model_copy(update={"data": b""})
    elif isinstance(event, RewardMissing):
        circumstance = event.circumstance.model_copy(update={"responses": None})  # in `extras`
    cause = cause_key(envelope, session_id)
    row: dict[str, Any] = {
        "session_id": session_id.bytes,
        "session_at": keys.session_time(session_id),
        "sequence": arrival.sequence,
        "event_time": envelope.time.astimezone(UTC),
        "epoch": epoch,
        "index": 0,
        "version": event.version,
        "kind": event.event_name(),
        "key": natural_key(event),
        "fact": canonical.encode(fact),
        "cause": cause.encode() if cause is not None else None,
        "circumstance": circumstance_json(circumstance) if circumstance is not None else None,
        "fact_json": query_json(fact),
        "event_id": envelope.id,
    }
    row.update(_typed(event))
    return row


def _typed(event: Event) -> dict[str, Any]:
    """The columns that only some cold events fill."""
    match event:
        case SessionRequested():
            policy = event.fact.policy
            return {"policy": policy.encode() if policy is not None else None}
        case SessionPlaced() | SessionReleased() | SessionResumed():
            return {"attempt": event.fact.attempt}
        case AnchorCaptured():
            return {"attempt": event.circumstance.attempt}
        case SessionStarted():
            return {
                "attempt": event.circumstance.attempt,
                "chain": event.fact.chain,
                "observation": event.circumstance.observation or None,
            }
        case SessionEnded():
            return {"attempt": event.circumstance.attempt, "chain": event.fact.chain}
        case RewardDeferred():
            return {"step": event.fact.step}
        case RewardMissing():
            return {"step": event.fact.step, "extras": event.circumstance.responses}
    return {}


def circumstance_json(part: Any) -> str:
    """A circumstance as JSON that PostgreSQL's `json` takes and that reads back the same, but for
    NaN and the infinities, which become texts."""
    return json.dumps(_plain(part.model_dump(mode="json"), None, keep_nul=True))


def query_json(fact: Any) -> str:
    """A fact as JSON that every operator of PostgreSQL can read: no NUL, no long texts."""
    return json.dumps(_plain(fact, FACT_JSON_TEXT_CHARS_MAX, keep_nul=False))


def _plain(value: Any, text_chars_max: int | None, *, keep_nul: bool) -> Any:
    if isinstance(value, str):
        if text_chars_max is not None and len(value) > text_chars_max:
            return None
        # `->>` fails for the whole query at one escaped NUL, so a picture of it stands in.
        return value if keep_nul else value.replace("\0", "\N{SYMBOL FOR NULL}")
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {
            _plain(str(key), None, keep_nul=keep_nul): _plain(
                item, text_chars_max, keep_nul=keep_nul
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_plain(item, text_chars_max, keep_nul=keep_nul) for item in value]
    return value
