"""A lease in a key-value bucket: one holder at a time, lost when it is not renewed."""

from __future__ import annotations

import contextlib
from typing import Any, Self

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext, api

from dsec.platform.bus.stream import OTHER_CONFIGURATION, refused

_AWAY = (nats.errors.Error, TimeoutError)


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
        bucket = f"dsec_lease_{key}"
        config = api.KeyValueConfig(bucket=bucket, ttl=ttl_s, history=1, replicas=replicas)
        try:
            try:
                kv = await js.create_key_value(config)
            except nats.js.errors.BadRequestError as error:
                if error.err_code != OTHER_CONFIGURATION:
                    raise
                live = (await js.stream_info(f"KV_{bucket}")).config
                await js.update_stream(live, max_age=ttl_s, num_replicas=replicas)
                kv = await js.key_value(bucket)
        except nats.js.errors.APIError as error:
            raise refused(f"the lease {key} cannot be made", error) from error
        return cls(kv, "holder", holder)

    async def renew(self) -> bool:
        """Take or keep the lease. False: somebody else holds it, or the bus is away."""
        try:
            if self._revision is None:
                self._revision = await self._kv.create(self._key, self._holder)
            else:
                self._revision = await self._kv.update(self._key, self._holder, last=self._revision)
        except _AWAY:
            self._revision = None
            return False
        return True

    async def release(self) -> None:
        """Give it up, if it is ours."""
        if self._revision is not None:
            with contextlib.suppress(*_AWAY):
                await self._kv.delete(self._key, last=self._revision)
            self._revision = None
