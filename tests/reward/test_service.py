"""The service on a real nats-server: what goes in, what comes out, and who may die."""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from uuid import UUID

import numpy as np
import psutil
import pytest

from dsec_contracts import RewardMissing, RewardScored, decode, encode
from tests.reward.conftest import ENV_SPEC, Rig, session, spec_of, tick

pytestmark = [pytest.mark.nats, pytest.mark.timeout(60)]

ADDS = spec_of("@dsec.reward()\ndef score(t, services):\n    return t.env_reward + 1\n")
RAISES = spec_of("def score(t, services):\n    raise ValueError('größe')\n")
SLOW = spec_of("import time\ndef score(t, s):\n    for _ in range(2 * 10**6): pass\n    return 1\n")
EXITS = spec_of("import os\ndef score(t, services):\n    os._exit(3)\n")
BLOCKS = spec_of("def score(t, services):\n    while True: pass\n")


def facts(events: list[RewardScored]) -> dict[tuple[bytes, int], bytes]:
    """By session and step; a row that came twice must be the same twice."""
    found: dict[tuple[bytes, int], bytes] = {}
    for event in events:
        ids = [event.row.session_id[n : n + 16] for n in range(0, 16 * event.rows, 16)]
        for raw_id, fact in zip(ids, event.row.fact.unpack(), strict=True):
            key = raw_id, decode(fact)[0]
            assert found.setdefault(key, fact) == fact
    return found


async def scored(rig: Rig, count: int, lane: str = "w-1-0") -> list[RewardScored]:
    events = await rig.events(f"dsec.reward.scored.{lane}", count)
    assert all(isinstance(event, RewardScored) for event in events)
    return [event for event in events if isinstance(event, RewardScored)]


async def missing(rig: Rig, count: int) -> dict[UUID, RewardMissing]:
    events = await rig.events("dsec.reward.missing.*", count)
    return {e.fact.session_id: e for e in events if isinstance(e, RewardMissing)}


async def test_128_rows_in_and_their_rewards_out(rig: Rig) -> None:
    rig.start()
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await rig.send(tick([ENV_SPEC[0]] * 128, step=3, env_reward=float), "w-1-0.7.0", trace)
    (message,) = await rig.messages("dsec.reward.>", 1)
    await rig.settled()
    assert message.subject == "dsec.reward.scored.w-1-0"
    envelope, event = message.envelope(), message.event()
    assert (envelope.id, envelope.source) == ("reward.w-1-0.7.0", "dsec/reward")
    assert envelope.traceparent == trace
    assert isinstance(event, RewardScored)
    assert (event.rows, event.circumstance.lane) == (128, "w-1-0")
    assert event.row.value == np.arange(128, dtype="<f8").tobytes()
    assert event.row.step == struct.pack("<i", 3) * 128
    for n, fact in enumerate(event.row.fact.unpack()):
        cause = bytes([n]) * 16
        assert fact == encode([3, 1, float(n), {"env": [float(n), 1.0]}, cause])
        assert event.row.session_id[16 * n : 16 * n + 16] == session(n).bytes
        assert event.row.cause[16 * n : 16 * n + 16] == cause


async def test_rewards_that_fill_more_than_a_message(rig: Rig) -> None:
    wide = spec_of(
        "@dsec.reward()\ndef score(t, s):\n    return {f'{n:0128}': 1 for n in range(64)}\n"
    )
    rig.know(wide)
    rig.start()
    await rig.send(tick([wide[0]] * 128), "a")
    messages = await rig.messages("dsec.reward.scored.*", 3)
    assert [m.envelope().id for m in messages] == ["reward.a", "reward.a.1", "reward.a.2"]
    assert len(facts(await scored(rig, 3))) == 128


async def test_a_function_that_raises_costs_its_own_session_only(rig: Rig) -> None:
    rig.know(ADDS, RAISES)
    rig.start()
    specs = [ADDS[0]] * 32
    specs[5], specs[7], specs[9] = RAISES[0], ENV_SPEC[0], ""
    await rig.send(tick(specs, step=2), "a")
    found = await missing(rig, 2)
    assert {i: e.fact.code for i, e in found.items()} == {
        session(5): "reward_raised",
        session(9): "reward_load_failed",
    }
    notice = found[session(5)]
    assert (notice.fact.step, notice.fact.fatal, notice.fact.cause) == (2, True, bytes([5]) * 16)
    assert (notice.circumstance.lane, "größe" in notice.circumstance.message) == ("w-1-0", True)
    (event,) = await scored(rig, 1)
    assert event.rows == 30
    values = np.frombuffer(event.row.value, "<f8")
    others = [n for n in range(32) if n not in (5, 9)]
    assert list(values) == [1.0 if n == 7 else 2.0 for n in others]
    assert event.row.session_id == b"".join(session(n).bytes for n in others)
    assert event.row.cause == b"".join(bytes([n]) * 16 for n in others)


async def test_functions_that_end_or_block_their_process(rig: Rig) -> None:
    rig.know(ADDS, EXITS, BLOCKS)
    replica = rig.start(deadline_s=0.5)
    await rig.send(tick([ADDS[0], EXITS[0], ADDS[0], BLOCKS[0], ADDS[0]]), "a")
    found = await missing(rig, 2)
    assert {i: e.fact.code for i, e in found.items()} == {
        session(1): "reward_crashed",
        session(3): "reward_deadline",
    }
    assert [e.rows for e in await scored(rig, 1)] == [3]
    await rig.send(tick([ADDS[0]], step=1), "b")
    await scored(rig, 2)
    assert replica.poll() is None  # the service itself never felt it
    names = [p.status() for p in psutil.Process(replica.pid).children()]
    assert len(names) == 1


async def test_a_thousand_sessions_of_one_blocking_function_cost_three_deadlines(rig: Rig) -> None:
    rig.know(BLOCKS)
    rig.start(deadline_s=0.5)
    start = time.monotonic()
    await rig.send(tick([BLOCKS[0]] * 1000), "a")
    found = await missing(rig, 1000)
    assert {e.fact.code for e in found.values()} == {"reward_deadline"}
    assert time.monotonic() - start < 15


async def test_a_message_delivered_again_gives_the_same_facts(rig: Rig) -> None:
    rig.know(ADDS, RAISES)
    rig.start()
    for event_id in ("a", "b"):  # a lane that heard nothing asks again under another id
        await rig.send(tick([ADDS[0], RAISES[0], ENV_SPEC[0]]), event_id)
    events = await scored(rig, 2)
    assert len(facts(events)) == 2
    notices = await rig.messages("dsec.reward.missing.*", 2)
    assert notices[0].event() == notices[1].event()


async def test_a_poison_message_among_a_hundred(rig: Rig) -> None:
    rig.start()
    for n in range(100):
        if n in (10, 50):
            good = tick([ENV_SPEC[0]])
            headers = {
                "ce-id": f"p{n}",
                "ce-type": "session.stepped.v1",
                "ce-source": "x",
                "ce-time": "2026-01-01T00:00:00+00:00",
            }
            body = b"{nonsense" if n == 10 else good.body().replace(b'"w-1-0"', b'"no lane"')
            await rig.bus.publish_raw("dsec.session.stepped.w-1-0", body, headers)
        await rig.send(tick([ENV_SPEC[0]] * 4, step=n), f"m{n}")
    assert len(facts(await scored(rig, 100))) == 400
    dead = await rig.messages("dsec.dead.reward", 2)
    assert "JSON" in dead[0].headers["dead-error"]
    assert "lane" in dead[1].headers["dead-error"]
    await rig.settled()


async def test_a_spec_that_is_late_is_waited_for(rig: Rig) -> None:
    rig.start(spec_wait_s=0.2)
    await rig.send(tick([ADDS[0]]), "a")
    await asyncio.sleep(2.5)  # more than one delivery
    assert await rig.bus.last_sequence("dsec.reward.missing.w-1-0") == 0
    rig.know(ADDS)
    assert [e.rows for e in await scored(rig, 1)] == [1]
    assert "again in" in rig.logs()


async def test_two_replicas_share_and_one_is_killed_at_work(rig: Rig) -> None:
    rig.know(SLOW)
    replicas = [rig.start(ack_wait_s=2) for _ in range(2)]
    for n in range(60):
        await rig.send(tick([SLOW[0]] * 2, step=n), f"m{n}")
    events = await scored(rig, 10)
    while len({e.circumstance.replica for e in events}) < 2:
        events = await scored(rig, len(events) + 1)
    replicas[0].send_signal(signal.SIGKILL)
    replicas[0].wait()
    await rig.settled()
    events = await scored(rig, 60)
    assert len(facts(events)) == 120
    assert {e.circumstance.replica for e in events} == {"r0", "r1"}


async def test_a_killed_replica_takes_its_scoring_process_along(rig: Rig) -> None:
    rig.know(BLOCKS)
    replica = rig.start()
    await rig.send(tick([BLOCKS[0]]), "a")
    children: list[psutil.Process] = []
    async with asyncio.timeout(15):
        while not children or not children[0].cpu_times().user > 0.5:
            children = psutil.Process(replica.pid).children()
            await asyncio.sleep(0.1)
    replica.kill()
    replica.wait()
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert gone
    assert not alive


async def test_long_work_is_not_given_to_another(rig: Rig) -> None:
    rig.know(SLOW)
    rig.start(ack_wait_s=1)
    await rig.send(tick([SLOW[0]] * 60), "a")
    await scored(rig, 1)
    await rig.settled()
    assert await rig.deliveries() == 1


async def test_a_stop_finishes_the_message_at_hand_and_leaves_the_rest(rig: Rig) -> None:
    rig.know(SLOW)
    first = rig.start()
    for n in range(8):
        await rig.send(tick([SLOW[0]] * 8, step=n), f"m{n}")
    await scored(rig, 1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(20) == 0
    states = [s for s in await rig.bus.consumers() if s.name == "reward"]
    assert [s.ack_pending for s in states] == [0]
    rig.start()
    assert len(facts(await scored(rig, 8))) == 64
