"""How patiently the bus is asked again. One policy, so that no two places mean different things
by "away"."""

from __future__ import annotations

from dataclasses import dataclass

import nats.errors
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from dsec.platform.bus.errors import BusUnavailable

PAUSE_S_MIN = 0.05

AWAY = (BusUnavailable, OSError, nats.errors.Error, TimeoutError)
"""How it shows that the bus is away."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A policy: for how long, and with which longest pause.

    The pauses are random, so that the clients of a server that comes back do not come at once.
    """

    wait_s_max: float
    pause_s_max: float

    def attempts(self, *more: type[Exception]) -> AsyncRetrying:
        """Attempts for as long as the bus is away, or says one of `more`; then the last error."""
        return AsyncRetrying(
            stop=stop_after_delay(self.wait_s_max),
            wait=wait_random_exponential(multiplier=PAUSE_S_MIN, max=self.pause_s_max),
            retry=retry_if_exception_type((*AWAY, *more)),
            reraise=True,
        )


CONNECTING = Retry(wait_s_max=30.0, pause_s_max=1.0)
LOOKING = Retry(wait_s_max=4.0, pause_s_max=0.5)
"""Of whoever only looks, and would rather hear that the bus is away than wait until it is back."""
PUBLISHING = Retry(wait_s_max=600.0, pause_s_max=2.0)
