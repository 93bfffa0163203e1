"""What a message of the stream turns out to be: an event, a request, a malformed one, or nothing.

Nothing that somebody publishes may stop the scheduler. A malformed request is answered with a
rejection that names the field; anything else that is malformed is the recorder's to put aside, and
is passed over here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dsec.platform.bus import BadMessage, Message
from dsec.scheduler.admission import AskMalformed, facts_digest
from dsec.scheduler.fold import CONSUMED
from dsec_contracts import subjects
from dsec_contracts.canonical import CanonicalError
from dsec_contracts.catalog import UnknownEvent, parse
from dsec_contracts.envelope import Event
from dsec_contracts.session import SessionRequested
from dsec_contracts.worker import WorkerHeartbeat

log = logging.getLogger(__name__)

FILTERS = [subjects.every(event.event_name()) for event in CONSUMED]
WRITTEN_CHARS_MAX = 256

_REQUESTS = subjects.start(SessionRequested.event_name())


@dataclass(frozen=True, slots=True)
class Requested:
    """A request that fits the schema."""

    event_id: str
    event: SessionRequested


Reading = Requested | AskMalformed | Event | None


def read(message: Message, epoch: int) -> Reading:
    """What a message turns out to be; None: nothing of ours."""
    if message.subject.startswith(_REQUESTS):
        return _read_request(message, epoch)
    try:
        event = message.event()
    except (BadMessage, UnknownEvent) as error:
        log.warning("%s at %d is passed over: %s", message.subject, message.sequence, error)
        return None
    # A message on another event's subject is nobody's: subjects say who may publish.
    if not message.subject.startswith(subjects.start(event.event_name())):
        log.warning("%s at %d holds a %s", message.subject, message.sequence, event.event_type())
        return None
    return event


def _read_request(message: Message, epoch: int) -> Reading:
    # Without an id of its own, the position in the stream names the event.
    given = {name.lower(): value for name, value in message.headers.items()}
    event_id = _written(given.get("ce-id") or f"position-{epoch}-{message.sequence}")

    def malformed(field: str | None, text: str) -> AskMalformed:
        return AskMalformed(event_id, field, text, written_session_id(message.data))

    try:
        envelope = message.envelope()
    except BadMessage as error:
        words = str(error).split(":")[0].split()
        return malformed(words[1] if words[:1] == ["header"] else None, str(error))
    try:
        event = parse(envelope.type, message.data)
    except UnknownEvent as error:
        if envelope.type.startswith(f"{SessionRequested.event_name()}.v"):
            log.warning("request at %d waits for an upgrade: %s", message.sequence, error)
            return None
        return malformed("ce-type", str(error))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = _written(".".join(str(part) for part in first["loc"]))
        return malformed(field or None, f"{field or 'body'}: {first['msg']}")
    if not isinstance(event, SessionRequested):
        return malformed("ce-type", f"{envelope.type} is no request")
    try:
        facts_digest(event.fact)
    except CanonicalError as error:
        return malformed("fact", f"fact: {error}")
    return Requested(envelope.id, event)


def written_session_id(body: bytes) -> str | None:
    """The session id as a malformed request has it, if it has one."""
    try:
        value: Any = json.loads(body)["fact"]["session_id"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return _written(value) if isinstance(value, str) else None


def _written(text: str) -> str:
    """Text of somebody else's, as an event can carry it."""
    safe = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    return safe[:WRITTEN_CHARS_MAX]


def read_heartbeat(headers: Mapping[str, str], data: bytes) -> WorkerHeartbeat | None:
    """A heartbeat; None: something else."""
    given = {name.lower(): value for name, value in headers.items()}
    try:
        event = parse(given.get("ce-type", ""), data)
    except (UnknownEvent, ValidationError) as error:
        log.warning("a heartbeat is passed over: %s", str(error).splitlines()[0])
        return None
    return event if isinstance(event, WorkerHeartbeat) else None
