"""An MCP server behind streamable HTTP, through the client's own transport; what comes is bounded.

The transport reads a body whole and tells of a refusal no more than that there was one. So each
answer is looked at before it is: a body has a bound, and a refusal says how long to wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from dsec.platform.clock import utc_now
from dsec.platform.http_client import retry_after_s
from dsec.tool.frames import Failure
from dsec.tool.http_exchange import RETRYABLE


class Heard:
    """What a transport has seen, and the client does not tell."""

    def __init__(self) -> None:
        self.too_large = False
        self.refusal: Failure | None = None

    def forget(self) -> None:
        """Before a call: what was seen is of another."""
        self.too_large, self.refusal = False, None

    def over(self) -> None:
        """More came than a result may have."""
        self.too_large = True


class _Bounded(httpx2.AsyncByteStream):
    """A body up to a bound."""

    def __init__(self, body: httpx2.AsyncByteStream, bytes_max: int, heard: Heard) -> None:
        self._body = body
        self._left = bytes_max
        self._heard = heard

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            self._left -= len(part)
            if self._left < 0:
                self._heard.over()
                raise httpx2.ReadError("more came than a result may have")
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


@contextlib.asynccontextmanager
async def http_of(
    url: str, headers: Mapping[str, str], bytes_max: int, wait_s: float | None, heard: Heard
) -> AsyncIterator[TransportStreams]:
    """Exchange messages with a server.

    Args:
        bytes_max: of one answer.
        wait_s: for what comes next; None: a call's deadline ends the process.
    """

    async def look_at(response: httpx2.Response) -> None:
        packed = response.headers.get("content-encoding", "identity").lower()
        if packed not in ("", "identity"):  # what it says may be thousands of times larger
            why = f"the answer is packed ({packed:.40}), which was not asked for"
            heard.refusal = Failure("mcp_broken", why)
            raise httpx2.DecodingError(why)
        if (status := response.status_code) in RETRYABLE:
            rest_s = retry_after_s(response.headers.get("retry-after"), utc_now())
            heard.refusal = Failure("http_status", f"HTTP {status}", True, rest_s)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream, bytes_max, heard)

    async with (
        httpx2.AsyncClient(
            headers={**headers, "Accept-Encoding": "identity"},
            timeout=wait_s,
            event_hooks={"response": [look_at]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=bytes_max) as streams,
    ):
        yield streams
