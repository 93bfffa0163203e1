"""A lane: what it publishes, how often, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.env_runtime.conftest import PAYLOAD_BYTES_MAX, LaneRig, Row, code_of, connected, end

from dsec.env_runtime.ends import UNPUBLISHABLE
from dsec.env_runtime.replies import feed
from dsec.platform.objects import ObjectStore
from dsec.session.chain import chain_end
from dsec.session.io import Input, cancel_input, reward_input
from dsec.session.observations import resolve
from dsec_contracts import decode, encode
from dsec_contracts.step import STEP_FIELDS

pytestmark = pytest.mark.nats

INPUTS = STEP_FIELDS.index("inputs")


@pytest.fixture
async def small(small_nats_url: str, tmp_path: Path) -> AsyncIterator[LaneRig]:
    """A rig whose server takes small messages only."""
    async with connected(small_nats_url) as bus:
        made = LaneRig(small_nats_url, bus, tmp_path)
        made.spawn(made.follow())
        yield made
        await end(made.tasks)


def answer(row: Row, value: float = 1.0) -> Input:
    """The reward of a step, as its lane hears it."""
    cause = row.chain[:16]
    fact = encode([row.step, 1, value, {"env": [value, 1.0]}, cause])
    return reward_input(row.step, value, fact, cause)


async def test_sessions_step_together_and_end_when_they_are_done(rig: LaneRig) -> None:
    await rig.start()
    rig.answering = True
    seats = [rig.seat(max_steps=3) for _ in range(5)]
    for seat in seats:
        rig.lane.join(seat)
    await rig.until(lambda: len(rig.ends) == 5)
    assert {ended.code for _, ended in rig.ends} == {"max_steps"}
    assert len({row.message.sequence for row in rig.rows if row.step == 0}) == 1
    assert not rig.lane.seats


async def test_an_unanswered_step_is_published_again_ever_more_rarely(rig: LaneRig) -> None:
    await rig.start(reply_wait_s=0.4)
    seat = rig.seat()
    rig.lane.join(seat)

    async def repeat() -> None:
        while True:
            await asyncio.sleep(0.01)
            rig.lane.repeat_unanswered()

    rig.spawn(repeat())
    rows = await rig.stepped(seat.request.session_id, 4)
    assert {(row.step, row.fact, row.chain) for row in rows} == {(0, rows[0].fact, rows[0].chain)}
    times = [row.message.time for row in rows]
    waits_s = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    # The server says when it took a step, which is a moment after it was published. Without a
    # wait that grows, the second one would be too short already.
    for wait_s, expected_s in zip(waits_s, (0.4, 0.8, 1.6), strict=False):
        assert wait_s > 0.6 * expected_s


async def test_an_answered_step_is_not_published_again(rig: LaneRig) -> None:
    await rig.start(reply_wait_s=0.0)
    seat = rig.seat(max_steps=9)
    rig.lane.join(seat)
    [row] = await rig.stepped(seat.request.session_id, 1)
    rig.lane.give(seat, answer(row))
    rig.lane.repeat_unanswered()
    rows = await rig.stepped(seat.request.session_id, 2)
    assert [row.step for row in rows] == [0, 1]


async def test_an_end_that_comes_while_steps_are_published_again_is_published_too(
    rig: LaneRig,
) -> None:
    await rig.start(reply_wait_s=0.0)
    seat = rig.seat()
    rig.lane.join(seat)
    await rig.stepped(seat.request.session_id, 1)
    rig.lane.repeat_unanswered()
    while rig.lane._unanswered:  # noqa: ASYNC110 - until the lane has taken them
        await asyncio.sleep(0)
    rig.lane.give(seat, cancel_input("cancelled"))  # the publish is on its way
    await rig.until(lambda: rig.ends)


async def test_answers_to_another_chain_another_step_or_given_before_change_nothing(
    rig: LaneRig,
) -> None:
    await rig.start()
    seat = rig.seat()
    rig.lane.join(seat)
    [first] = await rig.stepped(seat.request.session_id, 1)
    await rig.reward(first, value=5.0, cause=b"x" * 16)
    await rig.reward(first, value=6.0, step=1)
    await rig.reward(first, value=1.0)
    second = (await rig.stepped(seat.request.session_id, 2))[1]
    await rig.reward(first, value=7.0)
    await rig.reward(second, value=2.0)
    third = (await rig.stepped(seat.request.session_id, 3))[2]
    assert [row.step for row in rig.steps(seat.request.session_id)] == [0, 1, 2]
    for row, counted in ((second, answer(first, 1.0)), (third, answer(second, 2.0))):
        assert encode(decode(row.fact)[INPUTS]) == encode([decode(counted.name())])


async def test_a_session_that_waits_for_long_does_not_hold_up_the_others(rig: LaneRig) -> None:
    await rig.start()
    slow, quick = rig.seat(), rig.seat(max_steps=3)
    rig.lane.join(slow)
    rig.lane.join(quick)
    for step in range(3):
        await rig.reward((await rig.stepped(quick.request.session_id, step + 1))[step])
    await rig.until(lambda: rig.ends)
    assert len(rig.steps(slow.request.session_id)) == 1


async def test_a_lane_ends_when_it_is_cancelled_though_an_answer_comes_with_it(
    rig: LaneRig,
) -> None:
    await rig.start(lane_wait_ms=60_000)
    seat = rig.seat()
    rig.lane.join(seat)
    [row] = await rig.stepped(seat.request.session_id, 1)
    await rig.until(lambda: rig.lane._answered._waiters)
    rig.lane.give(seat, answer(row))
    await asyncio.sleep(0)
    rig.stepping.cancel()
    await asyncio.wait([rig.stepping], timeout=60)
    assert rig.stepping.cancelled()


async def test_a_lane_that_stops_has_published_what_it_stepped_and_steps_no_more(
    rig: LaneRig,
) -> None:
    await rig.start()
    seat = rig.seat()
    rig.lane.join(seat)
    while seat.machine.awaiting is None:  # noqa: ASYNC110 - until it is stepped, not published
        await asyncio.sleep(0)
    assert await rig.lane.stop() == [seat]
    assert seat.published_ns > 0
    rig.lane.join(rig.seat())
    [row] = await rig.stepped(seat.request.session_id, 1)
    await asyncio.sleep(0.2)
    assert rig.rows == [row]


async def test_a_tick_over_the_message_limit_is_halved_until_it_fits(small: LaneRig) -> None:
    await small.start()
    seats = [small.seat(reward_spec=f"{n:x}" * 3000) for n in range(16)]  # more than is reckoned
    for seat in seats:
        small.lane.join(seat)
    await small.until(lambda: len(small.rows) >= 16)
    assert {row.session_id for row in small.rows} == {s.request.session_id for s in seats}
    assert len(small.rows) == 16
    assert len({row.message.sequence for row in small.rows}) >= 4
    assert not small.ends


async def test_a_step_that_fits_no_message_ends_its_session_and_no_other(small: LaneRig) -> None:
    await small.start()
    small.answering = True
    large = small.seat(code_of(kwargs={"info_bytes": 30_000, "at_step": 2}), max_steps=9)
    other = small.seat(max_steps=9)
    small.lane.join(large)
    small.lane.join(other)
    await small.until(lambda: len(small.ends) == 2)
    ended = {seat.request.session_id: ended for seat, ended in small.ends}
    end_of_large = ended[large.request.session_id]
    assert (end_of_large.status, end_of_large.code) == ("failed", UNPUBLISHABLE)
    assert f"the server takes {PAYLOAD_BYTES_MAX}" in end_of_large.message
    rows = small.steps(large.request.session_id)
    assert [row.step for row in rows] == [0, 1]
    none = encode([])
    assert end_of_large.steps == 2
    assert end_of_large.chain == chain_end(rows[1].chain, "failed", UNPUBLISHABLE, 2, 0, none)
    assert ended[other.request.session_id].code == "max_steps"


async def test_large_observations_are_referred_to_or_left_out_and_small_ones_inline(
    rig: LaneRig, tmp_path: Path
) -> None:
    store = ObjectStore(f"file://{tmp_path}/blobs")
    await rig.start(store)
    kept = code_of(kwargs={"size": 1000}, observations={"inline_bytes_max": 100})
    dropped = code_of(
        kwargs={"size": 1000}, observations={"inline_bytes_max": 100, "above": "none"}
    )
    small = code_of(observations={"inline_bytes_max": 100})
    seats = [rig.seat(code) for code in (kept, dropped, small)]
    for seat in seats:
        rig.lane.join(seat)
    await rig.until(lambda: len(rig.rows) == 3)
    refers, leaves_out, inline = (rig.steps(seat.request.session_id)[0] for seat in seats)
    assert refers.message.sequence == leaves_out.message.sequence == inline.message.sequence

    assert len(refers.observation) < 120
    for recorded, n in ((refers.observation, 1.0), (refers.prior, 0.5)):
        assert resolve(recorded, store.get) == encode(np.full(1000, n, np.float32))
    assert (leaves_out.observation, leaves_out.prior) == (b"", b"")
    assert inline.observation == encode(np.full(4, 1.0, np.float32))
    assert inline.prior == encode(np.full(4, 0.5, np.float32))


async def test_answers_that_get_lost_on_the_way_are_not_passed_over(rig: LaneRig) -> None:
    await rig.start()
    seat = rig.seat()
    rig.lane.join(seat)
    (row,) = await rig.stepped(seat.placed.session_id, 1)
    consumer = await rig.bus.consumer("lane-lossy", ["dsec.reward.scored.lossy"], ack="none")
    await rig.reward(row, value=7.0, lane="lossy")
    (lost,) = await consumer.fetch(1, 60)  # as if the client had dropped it
    await rig.reward(row, value=8.0, lane="lossy")
    async with asyncio.timeout(60):
        assert await feed(rig.lane, consumer, after=lost.sequence - 1) == lost.sequence - 1
    assert seat.machine.steps == 1, "an answer counted that was not the first"
