"""One call to an outside service, from its first attempt to its end: its time, and its retries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    wait_random_exponential,
)

from dsec.platform.budget import CLOSED_S_MAX
from dsec.reward.http_exchange import Again
from dsec.reward.services import Request, Response
from dsec_contracts.service import ServiceRetry


@dataclass(slots=True)
class Stopwatch:
    """What a call has taken of its deadline: attempts and rests."""

    now: Callable[[], float]
    spent_s: float = 0.0
    since: float | None = None

    def seconds(self) -> float:
        """So far."""
        return self.spent_s + (0.0 if self.since is None else self.now() - self.since)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within this, time is taken."""
        self.since = self.now()
        try:
            yield
        finally:
            self.spent_s, self.since = self.seconds(), None


@dataclass(eq=False, slots=True)
class UnderWay:
    """A call that has not ended.

    `last`: why its last attempt has to be made again. `excused_s`: what the service itself had it
    rest. The calls behind it wait that out in the queue for the budget, where it counts for
    nothing; so it counts for nothing here, or the one that was told would fail in their place.
    """

    request: Request
    key: str
    stopwatch: Stopwatch
    batched: bool
    last: Again | None = None
    excused_s: float = 0.0

    async def retried(
        self,
        retry: ServiceRetry,
        left_s: Callable[[], float],
        attempt: Callable[[UnderWay], Awaitable[Response]],
    ) -> Response:
        """What an attempt gave; more are made after those that raise `Again`, with rests between.

        Args:
            left_s: of the deadline. A rest that would outlast it is not begun.

        Raises:
            Again: the last attempt's.
        """
        random_wait = wait_random_exponential(retry.backoff_s_min, retry.backoff_s_max)

        def wait(state: RetryCallState) -> float:
            asked_s = self.last.retry_after_s if self.last is not None else 0.0
            return max(random_wait(state), min(asked_s, CLOSED_S_MAX))

        def stop(state: RetryCallState) -> bool:
            over = left_s() <= state.upcoming_sleep
            return over or state.attempt_number >= retry.attempts_max

        async def rest(seconds: float) -> None:
            with self.stopwatch.running():
                await asyncio.sleep(seconds)

        attempts = AsyncRetrying(
            retry=retry_if_exception_type(Again), wait=wait, stop=stop, sleep=rest, reraise=True
        )
        return await attempts(attempt, self)
