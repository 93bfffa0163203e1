"""An HTTP service on loopback that reward functions ask: fast at first, later slow now and then.

    python loadtests/slow_service.py SEED

prints its URL and serves until standard input ends; then prints what it saw, as JSON. What it
answers is a function of the question alone. When it is slow follows from the seed and the time
since a line came on standard input; until then it is fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sales.services import chance, spells, within

FAST_S = 0.005
SLOW_S = 0.4
"""Twice what switches sessions to deferred rewards, unless a declaration says otherwise."""
SLOW_EVERY_S, SLOW_FOR_S = 15.0, 4.0
"""Mean time between slow spells, and about how long one takes."""
STOP_S_MAX = 10.0
WINDOW_S = 10.0
"""It says how often it was asked at most in any so long."""


@dataclass
class _Seen:
    """What the service saw."""

    began_s: float | None = None
    calls: int = 0
    slow: int = 0
    keys: set[str] = field(default_factory=set)
    lately: deque[float] = field(default_factory=deque)
    in_window_max: int = 0

    def called(self, now_s: float) -> None:
        """It was asked."""
        self.calls += 1
        self.lately.append(now_s)
        while self.lately[0] <= now_s - WINDOW_S:
            self.lately.popleft()
        self.in_window_max = max(self.in_window_max, len(self.lately))


async def serve(seed: int) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    slow_at, seen = spells(Random(f"{seed} slow"), SLOW_EVERY_S, SLOW_FOR_S), _Seen()

    async def worth(request: Request) -> JSONResponse:
        seen.called(loop.time())
        seen.keys.add(request.headers.get("idempotency-key", ""))
        slow = seen.began_s is not None and within(slow_at, loop.time() - seen.began_s)
        seen.slow += slow
        await asyncio.sleep(SLOW_S if slow else FAST_S)
        return JSONResponse({"worth": chance(0, sorted(request.query_params.items()))})

    app = Starlette(routes=[Route("/worth", worth)])
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells it in no other way
        await asyncio.sleep(0.01)
    print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        seen.began_s = loop.time()
    told = {
        "calls": seen.calls,
        "questions": len(seen.keys),
        "slow": seen.slow,
        "in_10_s_max": seen.in_window_max,
    }
    print(json.dumps(told), flush=True)
    server.should_exit = server.force_exit = True
    await serving


class SlowService:
    """The service as whoever started it sees it."""

    def __init__(self, url: str, process: asyncio.subprocess.Process) -> None:
        self.url = url
        self._process = process
        self.seen: dict[str, Any] = {}
        """What it saw, once it is over."""

    def begin(self) -> None:
        """From now on it is slow now and then."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def end(self) -> None:
        """Have it say what it saw, and stop."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        async with asyncio.timeout(STOP_S_MAX):
            self.seen = json.loads(await self._process.stdout.readline())


@contextlib.asynccontextmanager
async def slow_service(seed: int) -> AsyncIterator[SlowService]:
    """The service, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__)),
        str(seed),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield SlowService((await process.stdout.readline()).decode().strip(), process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
