"""Trimming keeps what must be kept."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dsec.platform.bus import ConsumerState, StreamState
from dsec.platform.roles import ROLES
from dsec.recorder.settings import RecorderSettings
from dsec.recorder.trim import TRIMMED, Trimmer, horizon

STREAM = StreamState(1, 1000, 1000, 100_000, 1 << 30, datetime(2026, 1, 1, tzinfo=UTC))


def consumer(name: str, floor: int, pending: int = 1, ack_pending: int = 0) -> ConsumerState:
    return ConsumerState(name, pending, ack_pending, floor, floor)


@pytest.mark.parametrize(
    ("consumers", "committed", "expected"),
    [
        ([], 700, (700, ())),
        ([], 5000, (1000, ())),
        ([consumer("reward", 300)], 700, (300, ())),
        ([consumer("anchor-sync", 300)], 700, (300, ())),
        ([consumer("lane-w1-0", 200, 0, 1), consumer("scheduler", 900)], 700, (200, ())),
        # Has all there is for it: its floor stands where its last message was.
        ([consumer("lane-w1-0", 2, 0, 0)], 700, (700, ())),
        # Somebody's own consumer holds nothing back.
        ([consumer("look", 1)], 700, (700, ())),
        # 100 bytes a message: 95,000 bytes behind, over the bound of 90,000.
        ([consumer("reward", 50), consumer("scheduler", 600)], 700, (600, ("reward",))),
    ],
)
def test_the_horizon(
    consumers: list[ConsumerState], committed: int, expected: tuple[int, tuple[str, ...]]
) -> None:
    found = horizon(STREAM, consumers, committed, 90_000)
    assert (found.sequence, found.not_waited_for) == expected


def test_whatever_a_service_has_not_read_holds_the_stream_back() -> None:
    durables = [durable.name for role in ROLES for durable in role.durables]
    assert len(durables) > 5
    for name in durables:
        assert horizon(STREAM, [consumer(name, 300)], 700, 90_000).sequence == 300, name


def test_fences_dead_letters_and_placements_are_not_among_what_is_trimmed() -> None:
    assert not any(
        s.startswith(("dsec.fence", "dsec.dead", "dsec.session.placed")) for s in TRIMMED
    )
    assert "dsec.session.>" not in TRIMMED
    assert {"dsec.session.stepped.*", "dsec.reward.>"} < set(TRIMMED)


@pytest.mark.postgres
@pytest.mark.nats
async def test_a_stream_is_trimmed_and_keeps_what_it_must(rig: Any, make: Any) -> None:
    live, over = make.new_session(), make.new_session()
    await rig.bus.fence("w9", "test")
    await rig.publish(make.placed(live), live)
    await rig.publish(make.placed(over), over)
    for n in range(20):
        await rig.publish(make.stepped([live, over], [n, n]), "l1")
    await rig.publish(make.ended(over, 20), over)
    reward = await rig.bus.consumer("reward", ["dsec.session.stepped.*"], ack="explicit")
    stepped = await rig.bus.last_sequence("dsec.session.stepped.l1")
    held: list[Any] = []
    async with asyncio.timeout(60):
        while len(held) < 20:
            held += await reward.fetch(20 - len(held), 1)
    for message in held[:10]:
        await message.ack()
    async with rig.recorder(trim_period_s=0.1, trim_keep_s=0.2, fetch_wait_s=0.05):
        await wait_messages(rig, 14)  # fence, 2 placements, 10 steps, 1 end
        assert await rig.bus.last_sequence("dsec.session.stepped.l1") == stepped
        assert await rig.bus.last_sequence(f"dsec.session.placed.{over}") != 0
        for message in held[10:]:
            await message.ack()
        await wait_messages(rig, 2)
        await asyncio.sleep(0.3)
        assert (await rig.bus.stream_state()).messages == 2
        assert await rig.bus.last_sequence("dsec.fence.w9") == 1
        assert await rig.bus.last_sequence(f"dsec.session.placed.{live}") == 2
        # Healthy publishers go on: the fence and the placement are still what they expect.
        last = await rig.bus.publish(
            make.stepped([live], [20]),
            "l1",
            source="t",
            time=make.now,
            event_id="x",
            fence="w1",
        )
        await rig.floor_at(last)
    assert len(rig.keys(over)) == 22
    assert rig.query("select placements_trimmed from log_floor") != [(0,)]


@pytest.mark.postgres
@pytest.mark.nats
async def test_who_holds_back_too_much_is_reported_and_no_longer_waited_for(
    rig: Any, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sid = make.new_session()
    for n in range(20):
        await rig.publish(make.stepped([sid], [n]), "l1")
    await rig.bus.consumer("reward", ["dsec.session.stepped.*"], ack="explicit")
    async with rig.recorder(trim_period_s=0.1, trim_keep_s=0, trim_hold_bytes_max=1000) as recorder:
        await wait_messages(rig, 0)
        assert recorder.counters.batches >= 1
    assert "consumer reward holds back" in caplog.text


@pytest.mark.postgres
@pytest.mark.nats
async def test_nothing_young_is_trimmed(rig: Any, make: Any) -> None:
    last = await rig.publish(make.stepped([make.new_session()], [0]), "l1")
    async with rig.recorder(trim_period_s=0.05, trim_keep_s=60):
        await rig.floor_at(last)
        await asyncio.sleep(0.5)
    assert (await rig.bus.stream_state()).messages == 1


async def wait_messages(rig: Any, count: int) -> None:
    async with asyncio.timeout(60):
        while (await rig.bus.stream_state()).messages != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_young_messages_stay(make: Any) -> None:
    """A worker to come may still need them, though every consumer there is has them."""
    time = make.now
    unused: Any = None
    trimmer = Trimmer(unused, RecorderSettings(trim_keep_s=100), lambda: time, 1, 0)
    assert trimmer.old_enough(10) == 0
    time += timedelta(seconds=60)
    assert trimmer.old_enough(20) == 0
    time += timedelta(seconds=60)
    assert trimmer.old_enough(30) == 10
    time += timedelta(seconds=60)
    assert trimmer.old_enough(40) == 20
