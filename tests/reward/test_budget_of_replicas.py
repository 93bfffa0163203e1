"""One budget for all replicas, on a real nats-server, while one is killed and one is added."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left

import pytest
from tests.reward.conftest import Rig, facts, spec_of
from tests.reward.http_service import Answer, Asked, http_service

from dsec.platform.budget import OVER_MAX, WINDOW_S

pytestmark = [pytest.mark.nats, pytest.mark.long, pytest.mark.timeout(120)]

QPS = 20.0
ASKS = spec_of(
    "@dsec.reward(services=['stock'])\n"
    "async def score(t, services):\n"
    "    return (await services['stock'].get('/left')).status\n"
)


async def test_a_budget_holds_while_a_replica_is_killed_and_one_is_added(rig: Rig) -> None:
    async with http_service() as stock:

        async def quick(asked: Asked) -> Answer:
            return Answer(body={})

        stock.behave = quick
        rig.know(ASKS)
        rig.declare("stock", stock.url, qps_budget=QPS)
        first = rig.start(ack_wait_s=1)
        rig.start(ack_wait_s=1)
        await rig.receiving(2)
        for n in range(16):
            await rig.send([ASKS[0]] * 24, f"t{n}", step=n)
        async with asyncio.timeout(30):
            while len(stock.asked) < 100:  # noqa: ASYNC110 - other processes ask
                await asyncio.sleep(0.05)
        first.kill()
        rig.start(ack_wait_s=1)
        killed_at = time.time()
        await asyncio.sleep(WINDOW_S - 2)
        times = sorted(asked.at for asked in stock.asked)
        most = max(bisect_left(times, at + WINDOW_S) - n for n, at in enumerate(times))
        assert most <= OVER_MAX * QPS * WINDOW_S, most
        # From when the first was under way; its last batch and its turn are what is lost.
        steady = [at for at in times if at >= times[20]]
        share = (len(steady) - 1) / (QPS * (steady[-1] - steady[0]))
        assert share >= 0.9, (share, killed_at - times[0], rig.logs())
        await rig.settled()
        assert len(facts(await rig.scored(16))) >= 16
