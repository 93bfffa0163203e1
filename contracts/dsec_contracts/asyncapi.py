"""The AsyncAPI 3.0 document: all channels and messages, for tools and people outside Python.

It is derived from the catalogue and never written by hand; `dsec_contracts.freeze` keeps
`contracts/asyncapi.json` equal to it. Payloads refer to the frozen schemas beside it.
"""

from __future__ import annotations

import inspect
from typing import Any

from dsec_contracts.catalog import EVENTS
from dsec_contracts.envelope import HEADER_CHARS_MAX, SPEC_VERSION, Event
from dsec_contracts.subjects import ROOT

ASYNCAPI_VERSION = "3.0.0"
DOCUMENT_VERSION = "1.0.0"
"""Of the document's shape. What a message looks like is versioned by its own type."""

UPSTREAM = frozenset(
    {"session.requested", "session.cancel_requested", "spec.registered", "policy.published"}
)
"""What others publish and DSec receives; all the rest DSec publishes."""

_SESSION_KEY = "The session id, lower case with hyphens."
_LANE_KEY = "The lane: one message is about many of its sessions."
_KEYS = {
    "spec.registered": "The spec's hash.",
    "policy.published": "`<name>-<version>`.",
    "session.rejected": "`ce-id` of the rejected event, or its SHA-256 where it is no token.",
    "session.stepped": _LANE_KEY,
    "reward.scored": _LANE_KEY,
    "reward.deferred": "The lane that waits for the reward.",
    "reward.missing": "The lane that waits for the reward.",
    "tool.begun": "`<session id>-<id of the call>`.",
    "tool.retried": "`<session id>-<id of the call>`.",
    "tool.returned": "The lane that waits for the result.",
    "tool.failed": "The lane that waits for the result.",
    "worker.fenced": "The worker's id.",
    "worker.heartbeat": "The worker's id.",
}


def document() -> dict[str, Any]:
    """The whole document, ready for JSON."""
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "DSec events",
            "version": DOCUMENT_VERSION,
            "description": "CloudEvents 1.0 in binary mode over NATS: attributes in headers, "
            "the event as JSON in the body. See contracts/README.md.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {event.event_name(): _channel(event) for event in EVENTS},
        "operations": {_operation_name(event): _operation(event) for event in EVENTS},
        "components": {
            "messages": {event.event_type(): _message(event) for event in EVENTS},
            "schemas": {"CloudEventsHeaders": _headers()},
        },
    }


def _channel(event: type[Event]) -> dict[str, Any]:
    name, kind = event.event_name(), event.event_type()
    carried = "JetStream stream DSEC" if event.durable else "core NATS, not in the stream"
    return {
        "address": f"{ROOT}.{name}.{{key}}",
        "description": f"{inspect.cleandoc(event.__doc__ or '')} Carried by {carried}.",
        "messages": {kind: {"$ref": f"#/components/messages/{kind}"}},
        "parameters": {"key": {"description": _KEYS.get(name, _SESSION_KEY)}},
    }


def _operation_name(event: type[Event]) -> str:
    verb = "receive" if event.event_name() in UPSTREAM else "send"
    return f"{verb}_{event.event_name().replace('.', '_')}"


def _operation(event: type[Event]) -> dict[str, Any]:
    channel = f"#/channels/{event.event_name()}"
    return {
        "action": "receive" if event.event_name() in UPSTREAM else "send",
        "channel": {"$ref": channel},
        "messages": [{"$ref": f"{channel}/messages/{event.event_type()}"}],
    }


def _message(event: type[Event]) -> dict[str, Any]:
    kind = event.event_type()
    return {
        "name": kind,
        "title": event.__name__,
        "summary": inspect.cleandoc(event.__doc__ or "").partition("\n")[0],
        "contentType": "application/json",
        "headers": {
            "allOf": [
                {"$ref": "#/components/schemas/CloudEventsHeaders"},
                {"type": "object", "properties": {"ce-type": {"const": kind}}},
            ]
        },
        "payload": {"$ref": f"./schemas/{kind}.schema.json"},
    }


def _headers() -> dict[str, Any]:
    def text(description: str) -> dict[str, Any]:
        return {
            "type": "string",
            "minLength": 1,
            "maxLength": HEADER_CHARS_MAX,
            "pattern": "^[!-~]([ -~]*[!-~])?$",
            "description": description,
        }

    return {
        "type": "object",
        "description": "Values are printable ASCII without spaces at the edges.",
        "required": ["ce-id", "ce-type", "ce-source", "ce-time"],
        "properties": {
            "ce-specversion": {"type": "string", "const": SPEC_VERSION},
            "ce-id": text("Unique per source; the same on every repetition of one event."),
            "ce-type": text("`<noun>.<verb>.v<version>`."),
            "ce-source": text("Who published it."),
            "ce-time": {**text("RFC 3339, with a time zone."), "format": "date-time"},
            "ce-subject": text("The session id, where the message is about one session."),
            "ce-causationid": text("`<session id>/<key>` of the event that caused this one."),
            "traceparent": text("W3C trace context."),
            "Nats-Msg-Id": text("Equal to `ce-id`: the stream drops what it has already."),
        },
    }
