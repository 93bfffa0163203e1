"""The `openai` kind of tool: a model behind any OpenAI-compatible endpoint.

Over plain HTTP and not with OpenAI's client: the servers that this is for (vLLM, llama.cpp) say
more than its types know, and what a server says is the record; what comes is bounded while it
comes; and nothing is sent twice but by the service, which knows whether that is safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from dsec.session.tool_document import ToolDocument
from dsec.tool.http_exchange import Request, body_of, exchanged, fail, json_of, sendable
from dsec.tool.model_answer import folded, recorded

STREAM_BYTES_MAX = 64 << 20
"""Of a stream: its pieces are many times larger than what they amount to."""
LINE_BYTES_MAX = 4 << 20
_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_OURS = ("model", "stream")


def complete(
    document: ToolDocument, arguments: dict[str, Any], key: str, secrets: Mapping[str, str]
) -> dict[str, Any]:
    """The model's answer, as `model_answer` has it.

    Raises:
        Refused: there is none.
    """
    for name in _OURS:
        if name in arguments:
            fail("arguments_invalid", f"arguments.{name}: the tool's spec says that, no call can")
    body = {**document.request, **arguments, "model": document.model}
    if document.stream:
        body = {"stream_options": {"include_usage": True}, **body, "stream": True}
    given = dict(document.headers)
    if document.api_key is not None:
        given["Authorization"] = f"Bearer ${{{document.api_key}}}"
    headers = {**sendable(given, secrets), "Idempotency-Key": key}
    url = document.url.rstrip("/") + _PATHS[document.api]
    answer = asyncio.run(_answered(document, Request("POST", url, {}, body, headers)))
    asked = {**document.request, **arguments}
    return recorded(answer, asked, document.api)


async def _answered(document: ToolDocument, request: Request) -> Any:
    async with exchanged(document, request) as answer:
        if document.stream and answer.content_type != "application/json":
            return await folded(_pieces(answer, document))
        # A server may not know streams.
        return json_of(await body_of(answer, document.output_bytes_max))


async def _pieces(answer: aiohttp.ClientResponse, document: ToolDocument) -> AsyncIterator[Any]:
    """The JSON of each event. The stream says that it is over, or each choice has its reason."""
    unfinished: dict[Any, bool] = {}
    async for data in _events(answer):
        if data.strip() == b"[DONE]":
            return
        piece = json_of(data)
        if isinstance(piece, dict) and isinstance(choices := piece.get("choices"), list):
            for choice in choices:
                if isinstance(choice, dict):
                    index = str(choice.get("index", 0))
                    reason = choice.get("finish_reason")
                    unfinished[index] = unfinished.get(index, True) and reason is None
        yield piece
    if not unfinished or any(unfinished.values()):
        fail("http_broken", "the stream broke off in its midst", retryable=document.idempotent)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events.

    Bytes, not text: that they are UTF-8 is for the reader of the JSON to say.
    """
    data: list[bytes] = []
    async for line in _lines(answer):
        if not line:
            if data:
                yield b"\n".join(data)
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    # What has no empty line behind it is half an event.


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest, size = b"", 0
    async for part in answer.content.iter_any():
        size += len(part)
        *lines, rest = (rest + part).split(b"\n")
        if size > STREAM_BYTES_MAX or len(rest) > LINE_BYTES_MAX:
            fail(
                "output_too_large", f"a stream of over {STREAM_BYTES_MAX} bytes, or an endless line"
            )
        for line in lines:
            yield line.removesuffix(b"\r")
