"""Places that several replicas share, on a real server: never more, and none lost for good."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

import pytest

from dsec.platform import places
from dsec.platform.bus import Bucket, Bus
from dsec.platform.places import LEASE_S, Places, living, read_held

pytestmark = pytest.mark.nats
SOON_S = 0.6
"""Whoever has no place within this is told that there is none."""
WAIT_S_MAX = 30.0
"""Whoever should have one waits so long for it."""


@pytest.fixture
async def bucket(nats_url: str) -> AsyncIterator[Bucket]:
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    yield await bus.bucket(f"test_{uuid.uuid4().hex}")
    await bus.close()


async def takes(shared: Places, wait_s: float = SOON_S) -> bool:
    """Whether a place can be had now."""
    try:
        async with shared.place(asyncio.get_running_loop().time() + wait_s):
            return True
    except TimeoutError:
        return False


async def test_a_place_is_held_for_as_long_as_it_is_wanted(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "LEASE_S", 2.0)
    monkeypatch.setattr(places, "RENEW_S", 0.2)
    one, other = (Places(bucket, "a", name, 1, time.time) for name in ("one", "other"))
    async with one.place(asyncio.get_running_loop().time() + WAIT_S_MAX):
        assert not await takes(other, 4.0)  # two leases long
        assert not await takes(one)
    assert await takes(other, WAIT_S_MAX)
    assert read_held((await bucket.get("a.places")).value) == {}


async def test_the_place_of_one_that_died_is_free_when_its_lease_has_run_out(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "LEASE_S", 3.0)
    dead, other = (Places(bucket, "a", name, 1, time.time) for name in ("dead", "other"))
    held = dead.place(asyncio.get_running_loop().time() + WAIT_S_MAX)
    await held.__aenter__()
    dead.close()  # it renews no more, and never leaves
    assert not await takes(other)
    assert await takes(other, WAIT_S_MAX)
    monkeypatch.setattr(places, "LEASE_S", 2 * WAIT_S_MAX)
    again = Places(bucket, "b", "dead", 1, time.time)
    held_again = again.place(asyncio.get_running_loop().time() + WAIT_S_MAX)
    await held_again.__aenter__()
    again.close()
    # One that starts anew under the name of one that died has its place at once.
    assert await takes(Places(bucket, "b", "dead", 1, time.time), WAIT_S_MAX)


async def test_one_that_is_stopped_gives_its_place_back(bucket: Bucket) -> None:
    shared, inside = Places(bucket, "a", "one", 1, time.time), asyncio.Event()

    async def work() -> None:
        async with shared.place(asyncio.get_running_loop().time() + WAIT_S_MAX):
            inside.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await takes(Places(bucket, "a", "other", 1, time.time), WAIT_S_MAX)


def test_what_is_no_place_is_none() -> None:
    for value in (b"", b"[]", b"7", b"x", b'{"a": "b"}', b'{"a": NaN}', b'{"a": null}'):
        assert read_held(value) == {}
    assert living({"past": 9.0, "wrong": 1e12, "held": 12.0}, 10.0) == {
        "wrong": 10.0 + LEASE_S,
        "held": 12.0,
    }
