"""The lease: one holder, handed over at once or after it has run out."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import pytest

from dsec.platform.bus import Bus
from dsec.scheduler.leadership import LEASE_TTL_S, Leadership, LeadershipLost

pytestmark = pytest.mark.nats
LONG_TTL_S = 120.0
"""A lease that does not run out while a test waits."""


async def test_one_leads_and_hands_over(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()  # the lease is kept as often as the stream
    stop = asyncio.Event()

    async def two(lease: str, ttl_s: float) -> list[Leadership]:
        return [
            Leadership(await bus.lease(lease, name, ttl_s), monotonic)
            for name in ("first", "second")
        ]

    try:
        first, second = await two("leadership-test-long", LONG_TTL_S)
        assert await first.take(stop)
        assert first.sure
        waiting = asyncio.create_task(second.take(stop))
        await asyncio.sleep(LEASE_TTL_S / 2)
        assert not waiting.done()
        await first.release()
        assert not first.sure
        async with asyncio.timeout(LONG_TTL_S / 2):  # it was given back, not waited for
            assert await waiting
        first, second = await two("leadership-test", LEASE_TTL_S)
        began = monotonic()
        assert await second.take(stop)
        async with asyncio.timeout(LONG_TTL_S):
            assert await first.take(stop), "the second never renewed"
        assert monotonic() - began > LEASE_TTL_S / 2
        with pytest.raises(LeadershipLost):
            await second.keep(stop)
        stop.set()
        assert not await second.take(stop)
    finally:
        await bus.close()


class FixedLease:
    """A lease that is always renewed."""

    async def renew(self) -> bool:
        return True


async def test_a_leader_is_sure_for_less_than_the_lease_lasts() -> None:
    clock = 100.0
    lease: Any = FixedLease()
    leadership = Leadership(lease, lambda: clock)
    assert not leadership.sure
    await leadership.take(asyncio.Event())
    assert leadership.sure
    clock += LEASE_TTL_S - 0.1
    assert not leadership.sure
    with pytest.raises(LeadershipLost):
        await leadership.keep(asyncio.Event())
