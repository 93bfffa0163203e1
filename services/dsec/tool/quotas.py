"""Quotas: how much of a tool may be used, by a session and at a time.

What a session has used up fails at once: another call of it will do no better. What only has to
wait, for a place or for the next moment, waits within the call's deadline and fails at its end.
Places and moments are those of all replicas together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Generic, Protocol, TypeVar

from dsec.platform.bus import Bucket
from dsec.platform.permits import Permits
from dsec.platform.places import Places
from dsec.session.tool_document import Quota
from dsec.tool.frames import Failure, Refused

TOOLS_KEPT_MAX = 4096
"""Beside those whose calls are under way."""
CODE = "quota"


class _Closed(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closed)


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


class _Kept(Generic[T]):
    """What tools share, by their specs' hashes. What somebody holds, or waits for, stays: made
    anew it would know nothing of them. Of the rest those that were used last are kept."""

    def __init__(self) -> None:
        self._things: OrderedDict[str, T] = OrderedDict()
        self._users: Counter[str] = Counter()

    @contextlib.contextmanager
    def used(self, name: str, make: Callable[[], T]) -> Iterator[T]:
        """Within this it stays."""
        if name not in self._things:
            self._things[name] = make()
        self._things.move_to_end(name)
        self._users[name] += 1
        try:
            yield self._things[name]
        finally:
            self._users[name] -= 1
            self._drop_some()

    def close(self) -> None:
        """Of all of them."""
        for thing in self._things.values():
            thing.close()

    def _drop_some(self) -> None:
        if (many := len(self._things) - TOOLS_KEPT_MAX) <= 0:
            return
        for name in [name for name in self._things if not self._users[name]][:many]:
            self._things.pop(name).close()
            del self._users[name]


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
        self._places: _Kept[Places] = _Kept()
        self._permits: _Kept[Permits] = _Kept()

    @contextlib.asynccontextmanager
    async def place(self, spec_hash: str, quota: Quota, until_s: float) -> AsyncIterator[None]:
        """Within this a call is one of those that may run at a time.

        Raises:
            Refused: no place became free until `until_s`, in the loop's time.
        """
        if quota.concurrency is None:
            yield
            return
        bucket = await self._shared()
        make = partial(Places, bucket, spec_hash, self._replica, quota.concurrency, self._clock)
        async with contextlib.AsyncExitStack() as held:
            places = held.enter_context(self._places.used(spec_hash, make))
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
        make = partial(Permits, await self._shared(), spec_hash, self._clock)
        with self._permits.used(spec_hash, make) as permits:
            permits.qps_budget = quota.per_s
            try:
                async with asyncio.timeout_at(until_s):
                    await permits.take()
            except TimeoutError:
                raise _over(f"{quota.per_s:g} calls a second (quota.per_s)") from None

    def close(self) -> None:
        """Take nothing more."""
        self._places.close()
        self._permits.close()

    async def _shared(self) -> Bucket:
        async with self._opening:
            if self._bucket is None:
                self._bucket = await self._open()
            return self._bucket


def _over(what: str) -> Refused:
    why = f"the tool allows {what}, and the call's deadline came before its turn"
    return Refused(Failure(CODE, why, retryable=True))
