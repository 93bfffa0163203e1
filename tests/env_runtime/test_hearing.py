"""A worker whose consumers get nothing finds out itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.env_runtime.conftest import World, connected

from dsec.env_runtime import hearing
from dsec.env_runtime.hearing import Deaf, Hearing
from dsec.env_runtime.worker import Worker
from dsec.platform.bus import Consumer, Message

pytestmark = pytest.mark.nats
DEAF_LIMIT_S = 1.2
WAIT_S_MAX = 60.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "CHECK_PERIOD_S", 0.05)
    monkeypatch.setattr(hearing, "DEAF_LIMIT_S", DEAF_LIMIT_S)


@pytest.mark.parametrize("ack", ["none", "explicit"])
async def test_what_waits_and_is_not_delivered_is_noticed(nats_url: str, ack: Any) -> None:
    async with connected(nats_url) as bus:
        name, subject = f"hearing-{ack}", f"dsec.tool.returned.hearing-{ack}"
        start = (await bus.stream_state()).last_sequence + 1
        consumer = await bus.consumer(name, [subject], start_sequence=start, ack=ack)
        watched = Hearing(bus)
        watched.add(consumer)
        watch = asyncio.create_task(watched.watch())
        await asyncio.sleep(1.5 * DEAF_LIMIT_S)
        assert not watch.done(), "nothing waits"

        async def hear(count: int) -> None:
            for _ in range(count):
                (message,) = await consumer.fetch(1, WAIT_S_MAX)
                await message.ack()
                await asyncio.sleep(0.2)

        for _ in range(8):
            await bus.publish_raw(subject, b"{}", {})
        await hear(7)
        assert not watch.done(), "some wait for long, and it gets on"
        with pytest.raises(Deaf, match=f"1 messages wait for {name}"):
            await asyncio.wait_for(watch, WAIT_S_MAX)
        watch = asyncio.create_task(watched.watch())
        watched.remove(consumer)
        await asyncio.sleep(1.5 * DEAF_LIMIT_S)
        assert not watch.done(), "it is not this worker's any more"
        watch.cancel()
        await bus.delete_consumer(name)


class LostLoop(Worker):
    """A worker whose lane asks, and never gets what it asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        opened = self.replies._open

        async def lost(name: str, lane: str, start_sequence: int) -> Consumer:
            consumer = await opened(name, lane, start_sequence)

            async def fetch(batch: int, timeout_s: float) -> list[Message]:
                await asyncio.sleep(3600)
                return []

            consumer.fetch = fetch  # type: ignore[method-assign]
            return consumer

        self.replies._open = lost  # type: ignore[method-assign]


@pytest.mark.postgres
async def test_a_worker_that_hears_no_answer_ends_though_it_beats(world: World) -> None:
    run = await world.worker("deaf", LostLoop)
    await asyncio.sleep(0.3)
    assert not run.task.done()
    await world.bus.publish_raw("dsec.reward.scored.deaf-0", b"{}", {})
    done, _ = await asyncio.wait({run.task}, timeout=WAIT_S_MAX)
    assert done
    error = run.task.exception()
    assert isinstance(error, ExceptionGroup)
    assert [type(one) for one in error.exceptions] == [Deaf]
    del world.runs["deaf"]
    await run.bus.close()
    await run.reader.close()
