"""One HTTP request and its answer, bounded, for every kind of tool that is behind HTTP.

No redirect is followed: it would take secrets in headers to wherever the answer says. There are no
time-outs here, since the deadline of the call ends the process.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

import httpx

from dsec.platform.secrets import HeaderUnfit, filled_headers
from dsec.session.tool_document import ToolDocument
from dsec.tool.frames import Failure, Refused

ERROR_BODY_BYTES_MAX = 1_000
"""How much of the body of a refusal goes into its message."""
RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent. `json` is None where there is no body."""

    method: str
    url: str
    query: Mapping[str, str]
    json: Any
    headers: Mapping[str, str]


@contextlib.contextmanager
def exchanged(document: ToolDocument, request: Request) -> Iterator[httpx.Response]:
    """The answer of a server, its body not read yet, if it is one of success.

    Raises:
        Refused: the server cannot be reached, refused, or broke off, also while its body is read
            within this.
    """
    try:
        url = httpx.URL(request.url)
        with httpx.stream(
            request.method,
            url.copy_merge_params(request.query) if request.query else url,
            json=request.json,
            headers=request.headers,
            timeout=None,
            follow_redirects=False,
        ) as response:
            if not response.is_success:
                _refuse(response)
            yield response
    except httpx.ConnectError as error:
        fail("http_unreachable", f"{document.url}: {error}", retryable=True)
    except httpx.LocalProtocolError as error:
        fail("arguments_invalid", f"{document.url}: this cannot be sent: {error!r}")
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        # The request may have got there.
        fail("http_broken", f"{document.url}: {error!r}", retryable=document.idempotent)


def _refuse(response: httpx.Response) -> NoReturn:
    body = b""
    for part in response.iter_bytes():
        body += part
        if len(body) > ERROR_BODY_BYTES_MAX:
            break
    start = body[:ERROR_BODY_BYTES_MAX].decode("utf-8", "replace")
    status = response.status_code
    wait_s = retry_after_s(response.headers.get("retry-after"), datetime.now(UTC))
    why = f"HTTP {status}: {start}"
    raise Refused(Failure("http_status", why, status in RETRYABLE, wait_s))


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """How long a server asks to be left alone: it says seconds, or a date. None: it does not."""
    if header is None:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(header)
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    try:
        until = parsedate_to_datetime(header)
    except (ValueError, OverflowError):  # a year that no date has
        return None
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - now).total_seconds())


def body_of(response: httpx.Response, bytes_max: int) -> bytes:
    """The whole body.

    Raises:
        Refused: it has more than `bytes_max` bytes.
    """
    body = bytearray()
    for part in response.iter_bytes():
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
