"""The HTTP kind of tool: one call is one request.

No redirect is followed: it would take secrets in headers to wherever the answer says. There are no
time-outs here, since the deadline of the call ends the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import httpx

from dsec.session.documents import ToolDocument
from dsec.tool.frames import Failure, Refused

ERROR_BODY_BYTES_MAX = 1_000
"""How much of the body of a refusal goes into its message."""
RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))
_SECRET = re.compile(r"\$\{([^}]*)\}")


def request(
    document: ToolDocument, arguments: dict[str, Any], key: str, secrets: Mapping[str, str]
) -> Any:
    """What the server answered: JSON where it says so, text otherwise.

    Raises:
        Refused: it cannot be reached, refused, or answered too much.
    """
    in_query = document.method in ("GET", "DELETE")
    try:
        url = httpx.URL(document.url)
        with httpx.stream(
            document.method,
            url.copy_merge_params(_query(arguments)) if in_query else url,
            json=None if in_query else arguments,
            headers=_headers(document, key, secrets),
            timeout=None,
            follow_redirects=False,
        ) as response:
            body = _body(response, document.output_bytes_max)
    except httpx.ConnectError as error:
        _fail("http_unreachable", f"{document.url}: {error}", retryable=True)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        # The request may have got there.
        _fail("http_broken", f"{document.url}: {error!r}", retryable=document.idempotent)
    if not response.is_success:
        start = body[:ERROR_BODY_BYTES_MAX].decode("utf-8", "replace")
        status = response.status_code
        _fail("http_status", f"HTTP {status}: {start}", retryable=status in RETRYABLE)
    return _parsed(response, body)


def _query(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Arguments as a query: texts as they are, all else as JSON."""
    return {n: v if isinstance(v, str) else json.dumps(v) for n, v in arguments.items()}


def _headers(document: ToolDocument, key: str, secrets: Mapping[str, str]) -> dict[str, str]:
    filled = {
        name: _SECRET.sub(lambda found: secrets[found[1]], value)
        for name, value in document.headers.items()
    }
    return {**filled, "Idempotency-Key": key}


def _body(response: httpx.Response, bytes_max: int) -> bytes:
    body = b""
    for part in response.iter_bytes():
        body += part
        if not response.is_success and len(body) > ERROR_BODY_BYTES_MAX:
            break
        if len(body) > bytes_max:
            _fail("output_too_large", f"over {bytes_max} bytes came, the tool's output_bytes_max")
    return body


def _parsed(response: httpx.Response, body: bytes) -> Any:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            why = f"the body is not the JSON that it is said to be: {error}"
            raise Refused(Failure("result_invalid", why)) from error
    return body.decode(response.charset_encoding or "utf-8", "replace")


def _fail(code: str, message: str, *, retryable: bool = False) -> NoReturn:
    raise Refused(Failure(code, message, retryable))
