"""A bucket's values are changed by one at a time, on a real server."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from dsec.platform.bus import Bus

pytestmark = pytest.mark.nats


async def test_of_several_who_change_a_value_one_does(nats_url: str) -> None:
    name = f"test_{uuid.uuid4().hex}"
    buses = [await Bus.connect(nats_url, f"test-{n}") for n in range(3)]
    try:
        await buses[0].ensure_stream()
        assert await buses[0].existing_bucket(name) is None
        buckets = [await bus.bucket(name) for bus in buses]
        assert await buckets[0].get("a") == (b"", 0)
        for _ in range(20):
            _, revision = await buckets[0].get("a")
            changes = [b.change("a", b"%d" % n, revision) for n, b in enumerate(buckets)]
            found = await asyncio.gather(*changes)
            (winner,) = [n for n, changed in enumerate(found) if changed is not None]
            assert await buckets[1].get("a") == (b"%d" % winner, found[winner])
        reader = await buses[2].existing_bucket(name)
        assert reader is not None
        assert (await reader.get("a")).revision > 0
    finally:
        for bus in buses:
            await bus.close()
