"""A small HTTP service whose behaviour a test sets, and which notes what it was asked and when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

REASON = "As the test wants it"


@dataclass(frozen=True)
class Asked:
    """One request."""

    at: float
    """Unix seconds, when all of it had come."""
    method: str
    path: str
    params: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """One response. `never`: none is sent, and the connection stays open."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    never: bool = False


Behaviour = Callable[[Asked], Awaitable[Answer]]


async def echo(asked: Asked) -> Answer:
    """Says what it was asked."""
    return Answer(body={"path": asked.path, "params": asked.params})


class HttpService:
    """One service on a port of its own."""

    def __init__(self) -> None:
        self.behave: Behaviour = echo
        self.asked: list[Asked] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port again if it did before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Be down: connections are closed, new ones refused."""
        if self._server is not None:
            self._server.close()
            for task in list(self._open):
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while (asked := await _read(reader)) is not None:
                    self.asked.append(asked)
                    answer = await self.behave(asked)
                    if answer.never:
                        await asyncio.Event().wait()
                    writer.write(_written(answer))
                    await writer.drain()
        except asyncio.CancelledError:
            pass  # `stop`
        finally:
            self._open.discard(task)
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode().split(" ", 2)
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode().partition(":")
        headers[name.strip().lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    parts = urlsplit(target)
    return Asked(time.time(), method, parts.path, dict(parse_qsl(parts.query)), headers, body)


def _written(answer: Answer) -> bytes:
    body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"HTTP/1.1 {answer.status} {REASON}"]
    lines += [f"{name}: {value}" for name, value in {**headers, **answer.headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@contextlib.asynccontextmanager
async def http_service() -> AsyncIterator[HttpService]:
    """A service that is up."""
    service = HttpService()
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
