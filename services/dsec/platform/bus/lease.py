"""A lease in a key-value bucket: one holder at a time, lost when it is not renewed."""

from __future__ import annotations

import contextlib
from typing import Any, Self

from nats.js import JetStreamContext

from dsec.platform.bus.bucket import AWAY, open_bucket


class Lease:
    """A lease: taken, renewed, released, or lost."""

    def __init__(self, kv: Any, key: str, holder: str) -> None:
        self._kv = kv
        self._key = key
        self._holder = holder.encode()
        self._revision: int | None = None

    @classmethod
    async def open(
        cls, js: JetStreamContext, key: str, holder: str, ttl_s: float, replicas: int
    ) -> Self:
        """A lease on `key` that runs out `ttl_s` after its last renewal; not taken yet.

        Raises:
            BusUnavailable: its bucket cannot be made or asked for at the moment.
            BusError: it never can.
        """
        kv = await open_bucket(js, f"dsec_lease_{key}", replicas, ttl_s)
        return cls(kv, "holder", holder)

    async def renew(self) -> bool:
        """Take or keep the lease. False: somebody else holds it, or the bus is away."""
        try:
            if self._revision is None:
                self._revision = await self._kv.create(self._key, self._holder)
            else:
                self._revision = await self._kv.update(self._key, self._holder, last=self._revision)
        except AWAY:
            self._revision = None
            return False
        return True

    async def release(self) -> None:
        """Give it up, if it is ours."""
        if self._revision is not None:
            with contextlib.suppress(*AWAY):  # then it runs out by itself
                await self._kv.delete(self._key, last=self._revision)
            self._revision = None
