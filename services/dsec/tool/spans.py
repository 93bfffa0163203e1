"""The span of one tool call, within its session's trace, as OpenTelemetry's conventions for
generative AI have it. Nothing of what was said or returned is in it."""

from __future__ import annotations

from datetime import datetime
from urllib.parse import urlsplit

from dsec.platform.clock import nanoseconds
from dsec.platform.telemetry import Span
from dsec.platform.telemetry.ids import placement_span, session_span, tool_span
from dsec.session.tool_document import ToolDocument
from dsec.tool.asked import Asked
from dsec.tool.frames import Failure, Outcome
from dsec_contracts.canonical import decode
from dsec_contracts.tool import ToolAnswerCircumstance

_TYPES = {"python": "function", "http": "extension", "openapi": "extension", "mcp": "extension"}
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
Attributes = dict[str, str | int | float | bool]


def call_span(
    asked: Asked,
    document: ToolDocument | None,
    outcome: Outcome,
    times: tuple[datetime, datetime],
    told: ToolAnswerCircumstance,
) -> Span:
    """The span; the same for every delivery of the call."""
    session_id, attempt = asked.session_id, asked.attempt
    parent = placement_span(session_id, attempt) if attempt else session_span(session_id)
    name, attributes = _about(asked, document, outcome)
    attributes |= {
        "dsec.tool.replica": told.replica,
        "dsec.tool.attempts": told.attempts,
        "dsec.tool.key": asked.key,
    }
    error = None
    if isinstance(outcome, Failure):
        attributes["error.type"] = error = outcome.code
    return Span(
        tool_span(session_id, asked.step, asked.turn, asked.index),
        name,
        nanoseconds(times[0]),
        nanoseconds(times[1]),
        parent,
        attributes,
        error=error,
    )


def _about(asked: Asked, document: ToolDocument | None, outcome: Outcome) -> tuple[str, Attributes]:
    """Name and attributes by the conventions: a model's call is a call of a model."""
    attributes: Attributes = {"gen_ai.tool.name": asked.name, "gen_ai.tool.call.id": asked.id}
    if document is None or document.kind != "openai":
        kind = document.kind if document is not None else ""
        attributes["gen_ai.operation.name"] = "execute_tool"
        attributes["gen_ai.tool.type"] = _TYPES.get(kind, "function")
        if kind == "mcp":
            attributes["mcp.method.name"] = "tools/call"
        return f"execute_tool {asked.name}", attributes | _server(document)
    operation = _OPERATIONS[document.api]
    attributes |= {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": document.model,
    }
    if isinstance(outcome, bytes):
        attributes |= _answer(decode(outcome))
    return f"{operation} {document.model}", attributes | _server(document)


def _server(document: ToolDocument | None) -> Attributes:
    parts = urlsplit(document.url) if document is not None else None
    if parts is None or not parts.hostname:
        return {}
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"server.address": parts.hostname, "server.port": port}


def _answer(answer: dict[str, object]) -> Attributes:
    """What a model's server says of its answer, where it says it as it should."""
    told: Attributes = {}
    if isinstance(model := answer.get("model"), str):
        told["gen_ai.response.model"] = model
    if isinstance(usage := answer.get("usage"), dict):
        for name, count in (("input", "prompt_tokens"), ("output", "completion_tokens")):
            if type(used := usage.get(count)) is int:
                told[f"gen_ai.usage.{name}_tokens"] = used
    return told
