"""One HTTP exchange with an outside service, and what it says: an answer, or "ask again".

No redirect is followed: it would take secrets in headers to wherever the answer says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import quote, urlencode

import aiohttp
from yarl import URL

from dsec.platform.clock import utc_now
from dsec.platform.http_client import retry_after_s
from dsec.platform.secrets import hidden, hidden_text
from dsec.reward.services import Request, Response

RESPONSE_BYTES_MAX: Final = 1 << 20
KEPT_HEADERS: Final = ("content-type",)
"""Headers that are recorded and given to functions: those that say how to read the body."""
MESSAGE_CHARS_MAX: Final = 300

Code = Literal["service_unavailable", "service_deadline", "service_invalid", "secret_absent"]


class ServiceFailed(Exception):
    """A call has failed for good."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code


class Again(Exception):
    """An attempt failed; another may do better. `code`: if there is no other."""

    def __init__(self, code: Code, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message[:MESSAGE_CHARS_MAX])
        self.code: Code = code
        self.retry_after_s = retry_after_s


_PATH_SAFE = "/%:@!$&'()*+,;=~-._"
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Client:
    """Where a service is, what it is sent with every request, and connections to it."""

    session: aiohttp.ClientSession
    base_url: str
    headers: Mapping[str, str]
    secrets: Mapping[str, str]
    """What must not stand in an answer, nor in what is told of a failure."""

    def url(self, request: Request) -> URL:
        """Below the base URL, always: nothing is decoded or normalised on the way."""
        query = f"?{urlencode(request.params)}" if request.params else ""
        path = quote(request.path, safe=_PATH_SAFE)
        return URL(f"{self.base_url.rstrip('/')}{path}{query}", encoded=True)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A response, and for how long its service wants to be left alone."""

    response: Response
    retry_after_s: float


async def exchange(client: Client, request: Request, key: str, attempt_s: float) -> Exchange:
    """Ask once.

    Raises:
        Again: it was not answered in time, or the connection failed.
        ServiceFailed: it cannot be asked that, or answered what nobody can use.
    """

    def told(error: Exception) -> str:
        # What was sent, and what came, may stand in the text of an error.
        return hidden_text(f"{type(error).__name__}: {error}", client.secrets)

    # Unpacked: one that is cut short in a packing can pass for a whole answer.
    headers = {"Accept-Encoding": "identity", **client.headers, "Idempotency-Key": key}
    if request.body is not None:
        headers["Content-Type"] = "application/json"
    try:
        async with asyncio.timeout(attempt_s):
            async with client.session.request(
                request.method,
                client.url(request),
                data=request.body,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                body = await _body(answer)
    except TimeoutError as error:
        raise Again("service_deadline", f"no answer within {attempt_s:.3g} s") from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
        raise Again("service_unavailable", told(error)) from error
    except (aiohttp.ClientError, ValueError, OverflowError) as error:
        raise ServiceFailed("service_invalid", told(error)) from error
    kept = {
        name: hidden_text(answer.headers[name], client.secrets)
        for name in KEPT_HEADERS
        if name in answer.headers
    }
    response = Response(answer.status, kept, hidden(body, client.secrets))
    wait_s = retry_after_s(answer.headers.get("retry-after"), utc_now())
    return Exchange(response, wait_s or 0.0)


async def exchange_batch(
    client: Client, path: str, requests: Sequence[Request], key: str, attempt_s: float
) -> tuple[Exchange, list[Response]]:
    """Ask several things at once. No responses where the batch itself was refused.

    Raises:
        Again, ServiceFailed: see `exchange`.
    """
    told = [
        {
            "method": request.method,
            "path": request.path,
            "params": [list(pair) for pair in request.params],
            "json": None if request.body is None else json.loads(request.body),
        }
        for request in requests
    ]
    body = json.dumps({"requests": told}, separators=(",", ":")).encode()
    whole = Request("", "POST", path, (), body)
    found = await exchange(client, whole, f"{key}.batch", attempt_s)
    if found.response.status != 200:
        return found, []
    return found, _several(found.response, len(requests))


def _several(response: Response, count: int) -> list[Response]:
    try:
        items: Any = response.json()["responses"]
        answers = [_item(item) for item in items]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ServiceFailed("service_invalid", f"no batch of responses: {error!r}") from error
    if len(answers) != count:
        raise ServiceFailed("service_invalid", f"{len(answers)} responses to {count} requests")
    return answers


def _item(item: dict[str, Any]) -> Response:
    status = item["status"]
    if not isinstance(status, int) or not 100 <= status <= 599:
        raise ValueError(f"status {status!r:.40}")
    body = json.dumps(item.get("json"), separators=(",", ":")).encode()
    return Response(status, {"content-type": "application/json"}, body)


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for part in answer.content.iter_chunked(_CHUNK_BYTES):
        body += part
        if len(body) > RESPONSE_BYTES_MAX:
            raise ServiceFailed("service_invalid", f"over {RESPONSE_BYTES_MAX} bytes came")
    return body
