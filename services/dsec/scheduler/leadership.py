"""Leadership: one scheduler acts, others stand by.

The lease is a help, not the guarantee: placements carry the sequence they build on, and the rest
has natural keys. But two schedulers that read one durable consumer would take messages from each
other, so a leader looks at its own clock and stops before its lease can have run out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dsec.platform.bus import Lease

log = logging.getLogger(__name__)

LEASE_NAME = "scheduler"
LEASE_TTL_S = 3.0
RENEWALS_PER_TTL = 4
MARGIN_S = 0.5


class LeadershipLost(Exception):
    """Another scheduler may lead by now: this one has to start anew."""


class Leadership:
    """Holds the lease, and knows until when it surely does."""

    def __init__(self, lease: Lease, monotonic: Callable[[], float]) -> None:
        self._lease = lease
        self._monotonic = monotonic
        self._sure_until_s = 0.0

    @property
    def sure(self) -> bool:
        """Whether nobody else can hold the lease."""
        return self._monotonic() < self._sure_until_s

    async def take(self, stop: asyncio.Event) -> bool:
        """Wait until the lease is ours. False: told to stop before."""
        standing_by = False
        while not stop.is_set():
            if await self._renew():
                return True
            if not standing_by:
                standing_by = True
                log.info("another scheduler leads, or its lease has not run out: standing by")
            await self._pause(stop)
        return False

    async def keep(self, stop: asyncio.Event) -> None:
        """Renew the lease until told to stop.

        Raises:
            LeadershipLost: it could not be renewed.
        """
        while not stop.is_set():
            await self._pause(stop)
            if not self.sure or not await self._renew():
                raise LeadershipLost("the lease could not be renewed in time")

    async def release(self) -> None:
        """Let the next one lead at once."""
        self._sure_until_s = 0.0
        await self._lease.release()

    async def _renew(self) -> bool:
        began_s = self._monotonic()
        if not await self._lease.renew():
            return False
        self._sure_until_s = began_s + LEASE_TTL_S - MARGIN_S
        return True

    async def _pause(self, stop: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(LEASE_TTL_S / RENEWALS_PER_TTL):
                await stop.wait()
        except TimeoutError:
            return
