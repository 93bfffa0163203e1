"""One HTTP request and its answer, bounded, for every kind of tool that is behind HTTP.

No redirect is followed: it would take secrets in headers to wherever the answer says. No connection
is kept, since a client sends again what it sent on one that turns out to be closed. There are no
time-outs here, since the deadline of the call ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp
from yarl import URL

from dsec.platform.clock import utc_now
from dsec.platform.http_client import open_session, retry_after_s
from dsec.platform.secrets import HeaderUnfit, filled_headers
from dsec.session.tool_document import ToolDocument
from dsec.tool.frames import Failure, Refused

ERROR_BODY_BYTES_MAX = 1_000
"""How much of the body of a refusal goes into its message."""
ERROR_BODY_WAIT_S = 2.0
"""How long that is waited for: the status is known, and the call's deadline is for an answer."""
RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))
ACCEPTED = 202
_LATER = (
    "HTTP 202: the server has taken the request and answers later, elsewhere, where nobody hears "
    "it; name an endpoint that waits, or, if this is all that it says, `accepted_is_result: true`"
)
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent. `json` is None where there is no body."""

    method: str
    url: str
    query: Mapping[str, str]
    json: Any
    headers: Mapping[str, str]


@contextlib.asynccontextmanager
async def exchanged(
    document: ToolDocument, request: Request
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer of a server, its body not read yet, if it is one of success.

    Raises:
        Refused: the server cannot be reached, refused, or broke off, also while its body is read
            within this.
    """
    answered = False
    try:
        url = URL(request.url).extend_query(request.query)
        body = {} if request.json is None else {"json": request.json}
        async with (
            open_session(kept=False, proxies=True) as session,
            session.request(
                request.method, url, headers=request.headers, allow_redirects=False, **body
            ) as answer,
        ):
            answered = True
            if not 200 <= answer.status < 300:
                await _refuse(answer)
            if answer.status == ACCEPTED and not document.accepted_is_result:
                fail("declaration_misfit", _LATER)
            yield answer
    except aiohttp.ClientConnectorError as error:
        fail("http_unreachable", f"{document.url}: {error}", retryable=True)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        if isinstance(error, ValueError) and not answered:
            fail("arguments_invalid", f"{document.url}: this cannot be sent: {error!r}")
        # The request may have got there.
        fail("http_broken", f"{document.url}: {error!r}", retryable=document.idempotent)


async def _refuse(answer: aiohttp.ClientResponse) -> NoReturn:
    body = bytearray()
    # The status says what went wrong; of the body whatever came is told.
    with contextlib.suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(ERROR_BODY_WAIT_S):
            while len(body) < ERROR_BODY_BYTES_MAX and (part := await answer.content.readany()):
                body += part
    start = bytes(body[:ERROR_BODY_BYTES_MAX]).decode("utf-8", "replace")
    wait_s = retry_after_s(answer.headers.get("retry-after"), utc_now())
    why = f"HTTP {answer.status}: {start}"
    raise Refused(Failure("http_status", why, answer.status in RETRYABLE, wait_s))


async def body_of(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The whole body.

    Raises:
        Refused: it has more than `bytes_max` bytes.
    """
    body = bytearray()
    async for part in answer.content.iter_chunked(_CHUNK_BYTES):
        body += part
        if len(body) > bytes_max:
            fail("output_too_large", f"over {bytes_max} bytes came, the tool's output_bytes_max")
    return bytes(body)


def json_of(body: bytes | str) -> Any:
    """What a text that is said to be JSON says; NaN and infinities are kept as they are.

    Raises:
        Refused: it is none, or no UTF-8.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        fail("result_invalid", f"the body is not the JSON that it is said to be: {error}")


def sendable(headers: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Headers with their secrets in place.

    Raises:
        Refused: one cannot be sent like that.
    """
    try:
        return filled_headers(headers, secrets)
    except HeaderUnfit as error:
        fail("secret_unfit", str(error))


def fail(code: str, message: str, *, retryable: bool = False) -> NoReturn:
    """End the call."""
    raise Refused(Failure(code, message, retryable))
