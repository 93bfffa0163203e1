"""The attempts of one call: when another is made, and what is waited for before it.

Only a tool that says so (`attempts_max`, which takes `idempotent`) is tried again, after a failure
that says that another attempt might do better. The pause is random, so that callers that failed
together do not come back together; a server that says how long it wants to be left alone
(Retry-After) is. A pause that the deadline does not have is not begun: the failure is the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_result,
    wait_random_exponential,
)

from dsec.tool.frames import Failure, Outcome

log = logging.getLogger(__name__)

PAUSE_S_MIN = 0.2
"""The bound of the first pause; each is up to twice as long."""
PAUSE_S_MAX = 30.0
_JITTERED = wait_random_exponential(multiplier=PAUSE_S_MIN, max=PAUSE_S_MAX)

OnRetry = Callable[[int, Failure, float], Awaitable[None]]
"""Is told which attempt failed, from 1, why, and how long the next one waits."""


async def made(
    attempt: Callable[[], Awaitable[Outcome]],
    attempts_max: int,
    deadline_s: float,
    on_retry: OnRetry,
) -> tuple[Outcome, int]:
    """The outcome of a call, and how many attempts it took."""
    loop, number = asyncio.get_running_loop(), 0
    until_s = loop.time() + deadline_s

    async def counted() -> Outcome:
        nonlocal number
        number += 1
        return await attempt()

    async def told(state: RetryCallState) -> None:
        failure = _result(state)
        assert isinstance(failure, Failure)
        await on_retry(state.attempt_number, failure, state.upcoming_sleep)

    def is_over(state: RetryCallState) -> bool:
        # By the loop's clock, as all waits here are.
        is_late = loop.time() + state.upcoming_sleep >= until_s
        return is_late or state.attempt_number >= attempts_max

    retrying = AsyncRetrying(
        retry=retry_if_result(_might_do_better),
        stop=is_over,
        wait=_pause_s,
        before_sleep=told,
        retry_error_callback=_result,
    )
    outcome: Outcome = await retrying(counted)
    return outcome, number


def _might_do_better(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.retryable


def _pause_s(state: RetryCallState) -> float:
    failure = _result(state)
    asked_s = failure.retry_after_s if isinstance(failure, Failure) else None
    return max(_JITTERED(state), asked_s or 0.0)


def _result(state: RetryCallState) -> Any:
    assert state.outcome is not None
    return state.outcome.result()
