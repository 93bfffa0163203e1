"""Calls that wait a moment for each other, so that they go in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dsec.reward.services import Response


class Batcher:
    """Collects calls of one service."""

    def __init__(
        self,
        send: Callable[[Sequence[Any]], Awaitable[list[Response]]],
        size_max: int,
        wait_ms: float,
    ) -> None:
        """Prepare.

        Args:
            send: sends several and gives their responses in order; what it raises, each of them
                raises.
        """
        self._send = send
        self._size_max = size_max
        self._wait_s = wait_ms / 1000
        self._open: list[tuple[Any, asyncio.Future[Response]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, call: Any) -> Response:
        """The response of one call, which goes with others."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Response] = loop.create_future()
        self._open.append((call, answered))
        if len(self._open) >= self._size_max:
            self._go()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._go)
        return await answered

    def hurry(self) -> None:
        """Wait for no more calls: what is gathered goes now, and what comes goes as it comes."""
        self._wait_s = 0.0
        self._go()

    def close(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._open = self._open, []
        if batch:
            task = asyncio.create_task(self._sent(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _sent(self, batch: list[tuple[Any, asyncio.Future[Response]]]) -> None:
        wanted = [(call, answered) for call, answered in batch if not answered.done()]
        if not wanted:
            return
        try:
            responses = await self._send([call for call, _ in wanted])
        except BaseException as error:
            for _, answered in wanted:
                if not answered.done():
                    answered.set_exception(
                        error if isinstance(error, Exception) else asyncio.CancelledError()
                    )
            if not isinstance(error, Exception):
                raise
            return
        for (_, answered), response in zip(wanted, responses, strict=True):
            if not answered.done():
                answered.set_result(response)
