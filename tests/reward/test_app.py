"""What `dsec.platform.app` makes of FastStream: order, a stop, a connection that is closed."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.reward.conftest import Rig

from dsec.platform.app import ConnectionClosed, ServiceApp
from dsec.platform.bus import Message
from dsec_contracts import subjects

pytestmark = [pytest.mark.nats, pytest.mark.timeout(180)]

ACK_WAIT_S = 30.0


async def send(rig: Rig, count: int) -> None:
    for n in range(count):
        await rig.bus.publish_raw("dsec.session.stepped.x", b"%d" % n, {})


def app(rig: Rig) -> ServiceApp:
    return ServiceApp(rig.bus, rig.url, "test-app", stop_s_max=5, ack_wait_s=ACK_WAIT_S)


async def test_one_after_the_other_and_in_order(rig: Rig) -> None:
    await send(rig, 50)
    seen: list[int] = []
    busy = 0
    stop = asyncio.Event()

    async def handler(message: Message) -> None:
        nonlocal busy
        busy += 1
        assert busy == 1
        await asyncio.sleep(0.001)
        seen.append(int(message.data))
        await message.ack()
        busy -= 1
        if len(seen) == 50:
            stop.set()

    made = app(rig)
    await made.handle("reward", subjects.every("session.stepped"), handler)
    await made.run(stop)
    assert seen == list(range(50))


@pytest.mark.parametrize("delay_s", [0.0, 0.0002, 0.001])
async def test_what_a_stop_finds_fetched_is_handed_back(rig: Rig, delay_s: float) -> None:
    await send(rig, 40)
    stop = asyncio.Event()
    seen: list[int] = []

    async def handler(message: Message) -> None:
        seen.append(int(message.data))
        await message.ack()
        if len(seen) == 20:
            asyncio.get_running_loop().call_later(delay_s, stop.set)

    made = app(rig)
    await made.handle("reward", subjects.every("session.stepped"), handler)
    await made.run(stop)
    consumer = await rig.bus.consumer(
        "reward", [subjects.every("session.stepped")], ack_wait_s=ACK_WAIT_S
    )
    start = time.monotonic()
    while len(seen) < 40 and time.monotonic() - start < 60:
        for message in await consumer.fetch(40, 1):
            seen.append(int(message.data))
            await message.ack()
    assert sorted(seen) == list(range(40))


async def test_a_closed_connection_ends_the_app(rig: Rig) -> None:
    async def handler(message: Message) -> None:
        await message.ack()

    made = app(rig)
    await made.handle("reward", subjects.every("session.stepped"), handler)
    running = asyncio.create_task(made.run(asyncio.Event()))
    await asyncio.sleep(0.3)
    await made.broker._connection.close()
    with pytest.raises(ConnectionClosed):
        await asyncio.wait_for(running, 60)
