"""Replicas that share the work, die at it, and stop."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest
from tests.reward.conftest import ENV_SPEC, Rig, facts, spec_of, start_replica
from tests.reward.http_service import Answer, Asked, http_service

from dsec.platform.bus import Bus
from dsec.platform.stack.nats_server import NatsServerOptions, nats_server_process
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess

pytestmark = [pytest.mark.nats, pytest.mark.timeout(180)]

SLOW = spec_of("def score(t, s):\n    for _ in range(500_000): pass\n    return 1\n")
ASKS = spec_of(
    "@dsec.reward(services=['stock'])\n"
    "async def score(t, services):\n"
    "    return (await services['stock'].get('/left')).json()['left']\n"
)
BLOCKS = spec_of("def score(t, services):\n    while True: pass\n")
STOPS_WITHIN_S = 20.0
"""Less than a stop waits for handlers at work, and than what is absent is waited for."""


async def test_two_replicas_share_and_one_is_killed_at_work(rig: Rig) -> None:
    rig.know(SLOW)
    for _ in range(2):
        rig.start(ack_wait_s=1)
    await rig.receiving(2)  # or one has done it all before the other is up
    count = 0
    for n in range(40):
        await rig.send([SLOW[0]] * 3, f"m{n}", step=n)
    seen: set[str] = set()
    while len(seen) < 2:
        count += 1
        seen = {e.circumstance.replica for e in await rig.scored(count)}
    victim = rig.replicas[0]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert count < 40
    await rig.settled()
    assert len(facts(await rig.scored(40))) == 120


async def test_of_two_replicas_one_is_killed_between_an_answer_and_its_reward(rig: Rig) -> None:
    """The other one asks again, under the same key, and there is one reward."""
    heard, killed = asyncio.Event(), asyncio.Event()

    async def slowly(asked: Asked) -> Answer:
        heard.set()
        await killed.wait()  # it has done its work, and nobody knows
        return Answer(body={"left": 7})

    async with http_service() as stock:
        stock.behave = slowly
        rig.know(ASKS)
        rig.declare("stock", stock.url)
        for _ in range(2):
            rig.start(ack_wait_s=1)
        await rig.receiving(2)
        await rig.send([ASKS[0]], step=4)
        async with asyncio.timeout(60):
            await heard.wait()
        [victim] = [replica for replica in rig.replicas if _talks_to(replica.pid, stock.port)]
        victim.kill()
        victim.wait()
        killed.set()
        found = await rig.scored(1)
        await rig.settled()
        assert len(facts(await rig.scored(1))) == 1
        assert {e.circumstance.replica for e in found} == {f"r{1 - rig.replicas.index(victim)}"}
        keys = [asked.headers["idempotency-key"] for asked in stock.asked]
        assert len(keys) == 2
        assert len(set(keys)) == 1


async def test_who_stops_hands_back_what_waits_for_a_budget(rig: Rig) -> None:
    """One request has been made and ends; the other is another replica's, at once."""

    async def slowly(asked: Asked) -> Answer:
        await asyncio.sleep(1)
        return Answer(body={"left": 7})

    async with http_service() as stock:
        stock.behave = slowly
        rig.know(ASKS)
        rig.declare("stock", stock.url, qps_budget=0.1)
        rig.start(ack_wait_s=10)
        await rig.receiving(1)
        await rig.send([ASKS[0]], "first", step=1)
        await rig.send([ASKS[0]], "second", step=2)
        async with asyncio.timeout(60):
            while not stock.asked:  # noqa: ASYNC110 - another process asks
                await asyncio.sleep(0.02)
        began = asyncio.get_running_loop().time()  # the budget is for one in 10 s
        rig.replicas[0].send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(rig.replicas[0].wait)
        assert (code, asyncio.get_running_loop().time() - began < 9) == (0, True)
        (event,) = await rig.scored(1)
        assert event.row.step[0] == 1
        await rig.left(1)
        rig.declare("stock", stock.url, version=2)
        rig.start(ack_wait_s=10)
        found = await rig.scored(2)
        assert {(e.row.step[0], e.circumstance.replica) for e in found} == {(1, "r0"), (2, "r1")}


async def test_who_stops_hands_back_what_waits_for_a_declaration(rig: Rig) -> None:
    rig.know(ASKS)
    rig.start(ack_wait_s=10)
    await rig.send([ASKS[0], ENV_SPEC[0]])
    await rig.scored(1)  # of the row that asks nobody; the other one waits
    began = asyncio.get_running_loop().time()
    rig.replicas[0].send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(rig.replicas[0].wait)
    assert (code, asyncio.get_running_loop().time() - began < STOPS_WITHIN_S) == (0, True)
    await rig.left(1)

    async def seven(asked: Asked) -> Answer:
        return Answer(body={"left": 7})

    async with http_service() as stock:
        stock.behave = seven
        rig.declare("stock", stock.url)
        rig.start(ack_wait_s=10)
        await rig.settled()
    assert len(facts(await rig.scored(2))) == 2


def _talks_to(pid: int, port: int) -> bool:
    connections = psutil.Process(pid).net_connections("tcp")
    return any(one.raddr and one.raddr.port == port for one in connections)


async def test_a_killed_replica_takes_its_scoring_process_along(rig: Rig) -> None:
    rig.know(BLOCKS)
    replica = rig.start()
    await rig.send([BLOCKS[0]])
    children: list[psutil.Process] = []
    async with asyncio.timeout(90):
        while not children or children[0].cpu_times().user < 1.5:  # starting takes less
            children = psutil.Process(replica.pid).children()
            await asyncio.sleep(0.1)
    replica.kill()
    replica.wait()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert gone
    assert not alive


async def test_a_stop_finishes_the_message_at_hand_and_keeps_no_other(rig: Rig) -> None:
    rig.know(SLOW)
    # Longer than this test waits: what the first one keeps for itself would be missed.
    first = rig.start(ack_wait_s=60)
    for n in range(12):
        await rig.send([SLOW[0]] * 3, f"m{n}", step=n)
    await rig.scored(1)
    first.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(first.wait, 60) == 0
    rig.start(ack_wait_s=60)
    assert len(facts(await rig.scored(12))) == 36


async def test_a_bus_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    options = NatsServerOptions(tmp_path / "nats", tmp_path / "nats.log", port, "for-tests-only")
    server = ChildProcess(nats_server_process(options))
    await server.wait_ready()
    replica = start_replica(options.url, tmp_path, "r0", ack_wait_s=1)
    try:
        (tmp_path / ENV_SPEC[0]).write_bytes(ENV_SPEC[1])
        rig = Rig(await Bus.connect(options.url, "test"), options.url, tmp_path, "w-1-0")
        await rig.bus.ensure_stream()
        await rig.send([ENV_SPEC[0]], "a")
        await rig.scored(1)
        server.send_signal(signal.SIGKILL)
        await server.stop()
        used = psutil.Process(replica.pid).cpu_times().user
        await asyncio.sleep(1)
        assert psutil.Process(replica.pid).cpu_times().user - used < 0.5  # waits, does not spin
        server = ChildProcess(nats_server_process(options))
        await server.wait_ready()
        await rig.send([ENV_SPEC[0]], "b", step=1)
        await rig.scored(2)
        assert replica.poll() is None
        await rig.bus.close()
    finally:
        replica.kill()
        replica.wait()
        await server.stop()
