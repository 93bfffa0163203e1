"""Places for requests under way, whose number may change while some are taken."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class Places:
    """Those of one replica for one service; first come, first served."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def resize(self, count_max: int) -> None:
        """From now on so many. Those beyond it that are taken stay so until they are given back,
        and count."""
        self._count_max = count_max
        self._let_in()

    async def __aenter__(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._let_in()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._leave()  # it had got its place already
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self._taken -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiters and self._taken < self._count_max:
            waiter = self._waiters.popleft()
            if not waiter.done():  # it may have been cancelled
                self._taken += 1
                waiter.set_result(None)
