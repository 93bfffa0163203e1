"""The HTTP kinds of tool: one call is one request, plain or as an OpenAPI operation has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

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
    return asyncio.run(_answered(document, made(document, arguments, headers)))


async def _answered(document: ToolDocument, request: Request) -> Any:
    async with exchanged(document, request) as answer:
        return _parsed(answer, await body_of(answer, document.output_bytes_max))


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
            # Quoted whole: a value with a slash in it must not become another path. Neither must
            # one that stands for the folder itself, or the one above.
            if _text(value) in (".", ".."):
                fail("arguments_invalid", f"arguments.{name}: {value!r} cannot be part of a path")
            url = url.replace("{" + name + "}", quote(_text(value), safe=""))
        elif place == "query":
            query[name] = _text(value)
        elif place == "header":
            told[name] = _header(name, _text(value))
        elif place == "body":
            body = value
        else:
            fail("arguments_invalid", f"arguments.{name}: the operation has no such parameter")
    return Request(document.method, url, query, body, told)


def _text(value: Any) -> str:
    """Texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _header(name: str, text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        fail(
            "arguments_invalid", f"arguments.{name}: no header has line breaks or other than ASCII"
        )
    return text


def _parsed(answer: aiohttp.ClientResponse, body: bytes) -> Any:
    kind = answer.content_type.lower()
    if kind == "application/json" or kind.endswith("+json"):
        return json_of(body)
    try:
        return body.decode(answer.charset or "utf-8", "replace")
    except LookupError:  # a character set that nobody knows
        return body.decode("utf-8", "replace")
