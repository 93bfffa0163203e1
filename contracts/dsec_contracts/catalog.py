"""The catalogue: every event by type, how a message becomes an event again, JSON Schemas."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from dsec_contracts import (
    anchor,
    curriculum,
    evaluation,
    reward,
    service,
    session,
    spec,
    step,
    tool,
    upcasters,
    worker,
)
from dsec_contracts.envelope import Event

EVENTS: tuple[type[Event], ...] = (
    spec.SpecRegistered,
    spec.PolicyPublished,
    service.ServiceDeclared,
    service.ServiceModeChanged,
    session.SessionRequested,
    session.SessionCancelRequested,
    session.SessionRejected,
    session.SessionPlaced,
    session.SessionStarted,
    session.SessionReleased,
    session.SessionResumed,
    session.SessionEnded,
    step.SessionStepped,
    reward.RewardScored,
    reward.RewardDeferred,
    reward.RewardMissing,
    reward.RewardRescoreRequested,
    reward.RewardRescored,
    tool.ToolCalled,
    tool.ToolBegun,
    tool.ToolRetried,
    tool.ToolReturned,
    tool.ToolFailed,
    anchor.AnchorCaptured,
    anchor.AnchorStored,
    anchor.AnchorLost,
    curriculum.CurriculumChanged,
    evaluation.PolicySanityChecked,
    worker.WorkerFenced,
    worker.WorkerHeartbeat,
)

BY_TYPE: dict[str, type[Event]] = {event.event_type(): event for event in EVENTS}


class UnknownEvent(LookupError):
    """A type that this version does not know. Park the message; a newer version will."""


def parse(event_type: str, body: bytes) -> Event:
    """The event of a message, upcast to the newest version that is known.

    Raises:
        UnknownEvent: the type is not in the catalogue.
        pydantic.ValidationError: the body does not fit the type's schema.
    """
    event_type, body = upcasters.upcast(event_type, body)
    event = BY_TYPE.get(event_type)
    if event is None:
        raise UnknownEvent(f"event type {event_type!r} is not known to this version")
    return event.model_validate_json(body)


def schema(event: type[Event]) -> dict[str, Any]:
    """The JSON Schema of an event's body."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{event.event_type()}.schema.json",
        **json.loads(_schema_text(event)),
    }


@cache
def _schema_text(event: type[Event]) -> str:
    # As text: whoever asks gets a dictionary of their own. A freeze asks twice for each.
    return json.dumps(TypeAdapter(event).json_schema(mode="validation"))
