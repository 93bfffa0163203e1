"""Collecting blobs beside sessions that run: what they could come back from stays."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.env_runtime.conftest import Code, World, code_of

from dsec.client import collecting
from dsec.client.client import Client
from dsec.client.collecting import collect
from dsec.platform.log import LogBehind
from dsec.platform.objects import ObjectStore
from dsec_contracts import PolicyPublished
from dsec_contracts.spec import PolicyFact

pytestmark = [pytest.mark.nats, pytest.mark.postgres]


async def publish(world: World, key: str) -> None:
    fact = PolicyFact(name="p", version=key[:16], content_hash=key, blob=key, size_bytes=1)
    await world.publish(PolicyPublished(fact=fact), key[:16])


async def test_what_is_published_and_not_logged_yet_is_waited_for(
    world: World, object_store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "FLOOR_WAIT_S_MAX", 0.5)
    store = ObjectStore(object_store_url)
    kept, orphan = store.put(b"kept"), store.put(b"orphan")
    await publish(world, kept)
    before_s = time.time() + 3600
    async with Client(
        nats_url=world.url, database_url=world.database_url, object_store_url=object_store_url
    ) as client:
        with pytest.raises(LogBehind):
            await collect(client, before_s)
        assert (store.get(kept), store.get(orphan)) == (b"kept", b"orphan")
        world.record()
        monkeypatch.setattr(collecting, "FLOOR_WAIT_S_MAX", 15.0)
        found = await collect(client, before_s)
    assert (found.named, found.orphans, found.removed) == (1, 1, 1)
    assert store.get(kept) == b"kept"


async def test_observations_that_are_referred_to_stay(world: World, object_store_url: str) -> None:
    world.record()
    world.answering = True
    await world.worker(object_store_url=object_store_url)
    seen: Code = code_of(observations={"inline_bytes_max": 8}, kwargs={"size": 64})
    request = await world.run_session(seen, max_steps=3)
    await world.ended(request.session_id)
    store = ObjectStore(object_store_url)
    before_s = time.time() + 3600
    blobs = {one.key for one in await asyncio.to_thread(store.older, before_s)}
    assert len(blobs) == 4, "the first observation, and one a step"
    orphan = store.put(b"orphan")
    async with Client(
        nats_url=world.url, database_url=world.database_url, object_store_url=object_store_url
    ) as client:
        assert (await collect(client, before_s)).removed == 1
    assert {one.key for one in store.older(before_s)} == blobs
    assert orphan not in blobs
