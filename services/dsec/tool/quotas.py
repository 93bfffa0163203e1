"""Quotas: how much of a tool may be used, by a session and at a time.

What a session has used up fails at once: another call of it will do no better. What only has to
wait, for a place or for the next moment, waits within the call's deadline and fails at its end.
Places and moments are those of all replicas together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable

from dsec.platform.bus import Bucket
from dsec.platform.permits import Permits
from dsec.platform.places import Places
from dsec.session.tool_document import Quota
from dsec.tool.frames import Failure, Refused

TOOLS_KEPT_MAX = 4096
CODE = "quota"


def used_up(quota: Quota, name: str, number: int, total: int, total_max: int | None) -> str | None:
    """Why a session may not make a call any more; None: it may.

    Args:
        number: which call of the tool it is in the session, from 0.
        total: which call of any tool.
    """
    most = quota.calls_per_session
    if most is not None and number >= most:
        return f"the session has made its {most} calls of {name} (quota.calls_per_session)"
    if total_max is not None and total >= total_max:
        return f"the session has made its {total_max} calls (tool_calls_max)"
    return None


class Quotas:
    """Places and moments of tools, by the hashes of their specs; shared by all replicas."""

    def __init__(
        self, bucket: Callable[[], Awaitable[Bucket]], replica: str, clock: Callable[[], float]
    ) -> None:
        """Prepare; the bucket is opened when the first tool has a quota.

        Args:
            clock: Unix seconds.
        """
        self._open = bucket
        self._replica = replica
        self._clock = clock
        self._opening = asyncio.Lock()
        self._bucket: Bucket | None = None
        self._places: OrderedDict[str, Places] = OrderedDict()
        self._permits: OrderedDict[str, Permits] = OrderedDict()

    @contextlib.asynccontextmanager
    async def place(self, spec_hash: str, quota: Quota, until_s: float) -> AsyncIterator[None]:
        """Within this a call is one of those that may run at a time.

        Raises:
            Refused: no place became free until `until_s`, in the loop's time.
        """
        if quota.concurrency is None:
            yield
            return
        places = self._places.get(spec_hash)
        if places is None:
            bucket, most = await self._shared(), quota.concurrency
            made = Places(bucket, spec_hash, self._replica, most, self._clock)
            places = self._places.setdefault(spec_hash, made)
        self._places.move_to_end(spec_hash)
        while len(self._places) > TOOLS_KEPT_MAX:
            self._places.popitem(last=False)
        async with contextlib.AsyncExitStack() as held:
            try:
                await held.enter_async_context(places.place(until_s))
            except TimeoutError:
                raise _over(f"{quota.concurrency} calls at a time (quota.concurrency)") from None
            yield

    async def moment(self, spec_hash: str, quota: Quota, until_s: float) -> None:
        """Wait until the next attempt may begin.

        Raises:
            Refused: that is not before `until_s`, in the loop's time.
        """
        if quota.per_s is None:
            return
        permits = self._permits.get(spec_hash)
        if permits is None:
            made = Permits(await self._shared(), spec_hash, self._clock)
            permits = self._permits.setdefault(spec_hash, made)
            permits.qps_budget = quota.per_s
        self._permits.move_to_end(spec_hash)
        while len(self._permits) > TOOLS_KEPT_MAX:
            self._permits.popitem(last=False)[1].close()
        try:
            async with asyncio.timeout_at(until_s):
                await permits.take()
        except TimeoutError:
            raise _over(f"{quota.per_s:g} calls a second (quota.per_s)") from None

    def close(self) -> None:
        """Take nothing more."""
        for places in self._places.values():
            places.close()
        for permits in self._permits.values():
            permits.close()

    async def _shared(self) -> Bucket:
        async with self._opening:
            if self._bucket is None:
                self._bucket = await self._open()
            return self._bucket


def _over(what: str) -> Refused:
    why = f"the tool allows {what}, and the call's deadline came before its turn"
    return Refused(Failure(CODE, why, retryable=True))
