"""The HTTP kinds of tool: one call is one request, plain or as an OpenAPI operation has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from dsec.session.tool_document import ToolDocument
from dsec.tool.http_exchange import Request, body_of, exchanged, fail, json_of, sendable


def request(
    document: ToolDocument, arguments: dict[str, Any], key: str, secrets: Mapping[str, str]
) -> Any:
    """What the server answered: JSON where it says so, text otherwise.

    Raises:
        Refused: it cannot be reached, refused, or answered too much.
    """
    headers = {**sendable(document.headers, secrets), "Idempotency-Key": key}
    made = _placed if document.kind == "openapi" else _plain
    with exchanged(document, made(document, arguments, headers)) as response:
        body = body_of(response, document.output_bytes_max)
    return _parsed(response, body)


def _plain(
    document: ToolDocument, arguments: Mapping[str, Any], headers: Mapping[str, str]
) -> Request:
    """Arguments in the query where there is no body, and in the body otherwise."""
    if document.method in ("GET", "DELETE"):
        query = {name: _text(value) for name, value in arguments.items()}
        return Request(document.method, document.url, query, None, headers)
    return Request(document.method, document.url, {}, arguments, headers)


def _placed(
    document: ToolDocument, arguments: Mapping[str, Any], headers: Mapping[str, str]
) -> Request:
    """Each argument where the operation has it; the one in the body is the body."""
    url, query, told, body = document.url, dict[str, str](), dict(headers), None
    for name, value in arguments.items():
        place = document.places.get(name)
        if place == "path":
            # Quoted whole: a value with a slash in it must not become another path.
            url = url.replace("{" + name + "}", quote(_text(value), safe=""))
        elif place == "query":
            query[name] = _text(value)
        elif place == "header":
            told[name] = _text(value)
        elif place == "body":
            body = value
        else:
            fail("arguments_invalid", f"arguments.{name}: the operation has no such parameter")
    return Request(document.method, url, query, body, told)


def _text(value: Any) -> str:
    """Texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _parsed(response: httpx.Response, body: bytes) -> Any:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        return json_of(body)
    return body.decode(response.charset_encoding or "utf-8", "replace")
