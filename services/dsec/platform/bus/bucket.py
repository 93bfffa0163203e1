"""A key-value bucket: small values that several processes change, none over another's head."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, Self

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext, api

from dsec.platform.bus.errors import BusUnavailable
from dsec.platform.bus.stream import OTHER_CONFIGURATION, refused

AWAY = (nats.errors.Error, TimeoutError)


class Entry(NamedTuple):
    """A value, and its revision: 0 where there is none."""

    value: bytes
    revision: int


class Bucket:
    """Values by key. Every change names the revision that it changes."""

    def __init__(self, kv: Any, name: str) -> None:
        self._kv = kv
        self._name = name

    @classmethod
    async def open(cls, js: JetStreamContext, name: str, replicas: int) -> Self:
        """A bucket, made if need be.

        Raises:
            BusUnavailable: it cannot be made or asked for at the moment.
            BusError: it never can.
        """
        return cls(await open_bucket(js, name, replicas), name)

    @classmethod
    async def existing(cls, js: JetStreamContext, name: str) -> Self | None:
        """A bucket, for reading; None: nobody has made it."""
        with contextlib.suppress(nats.js.errors.BucketNotFoundError, nats.js.errors.NotFoundError):
            return cls(await js.key_value(name), name)
        return None

    async def get(self, key: str) -> Entry:
        """What a key has; an empty value at revision 0 where it has none.

        Raises:
            BusUnavailable: the bus is away.
        """
        try:
            found = await self._kv.get(key)
        except nats.js.errors.KeyNotFoundError:
            return Entry(b"", 0)
        except AWAY as error:
            raise BusUnavailable(f"{self._name}/{key} cannot be read: {error!r}") from error
        return Entry(found.value or b"", found.revision)

    async def change(self, key: str, value: bytes, revision: int) -> int | None:
        """Write a value over the one at `revision`. Returns the new revision; None: somebody
        else has changed it before.

        Raises:
            BusUnavailable: the bus is away; whether it was written is not known.
        """
        try:
            changed: int = await self._kv.update(key, value, last=revision)
        except nats.js.errors.KeyWrongLastSequenceError:
            return None
        except AWAY as error:
            raise BusUnavailable(f"{self._name}/{key} cannot be written: {error!r}") from error
        return changed


async def open_bucket(
    js: JetStreamContext, bucket: str, replicas: int, ttl_s: float | None = None
) -> Any:
    """The client's own bucket, made if need be, or brought to these settings.

    Raises:
        BusUnavailable: it cannot be made or asked for at the moment.
        BusError: it never can.
    """
    config = api.KeyValueConfig(bucket=bucket, ttl=ttl_s, history=1, replicas=replicas)
    try:
        try:
            return await js.create_key_value(config)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != OTHER_CONFIGURATION:
                raise
            live = (await js.stream_info(f"KV_{bucket}")).config
            await js.update_stream(live, max_age=ttl_s, num_replicas=replicas)
            return await js.key_value(bucket)
    except nats.js.errors.APIError as error:
        raise refused(f"the bucket {bucket} cannot be made", error) from error
