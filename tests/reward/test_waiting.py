"""Rows that wait for services: when they run again, and with whom they are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reward.conftest import Rig, facts, session, spec_of
from tests.reward.http_service import Answer, Asked, http_service

from dsec.reward.waiting import GATHER_S, QUEUE_S_MIN, gather_s

ASKS = spec_of(
    "@dsec.reward(services=['stock'])\n"
    "async def score(t, services):\n"
    "    return (await services['stock'].get('/left')).status\n"
)


@given(st.floats(0, 1e9), st.floats(0, 1e3))
def test_who_is_held_comes_back_before_the_queue_is_over(now_s: float, queue_s: float) -> None:
    held_s = gather_s(now_s, queue_s)
    assert 0 <= held_s <= GATHER_S
    assert held_s <= queue_s / 2, "the budget must not wait for anybody"


@given(st.floats(0, 1e6), st.floats(0, GATHER_S / 2))
def test_all_that_are_held_run_at_one_instant(now_s: float, later_s: float) -> None:
    first = now_s + gather_s(now_s, QUEUE_S_MIN)
    if (second := now_s + later_s) < first - 1e-6:
        assert second + gather_s(second, QUEUE_S_MIN) == pytest.approx(first)


@pytest.mark.nats
@pytest.mark.timeout(180)
async def test_rows_that_queue_for_a_budget_are_told_together(rig: Rig) -> None:
    async with http_service() as stock:

        async def quick(asked: Asked) -> Answer:
            return Answer(body={})

        stock.behave = quick
        rig.know(ASKS)
        rig.declare("stock", stock.url, qps_budget=20)
        rig.start()
        await rig.send([ASKS[0]] * 60, step=1)
        messages = 1
        while len(found := facts(await rig.scored(messages))) < 60:
            messages += 1
        assert {raw_id for raw_id, _ in found} == {session(n).bytes for n in range(60)}
        assert messages <= 32, "two thirds of them were answered while others still queued"
