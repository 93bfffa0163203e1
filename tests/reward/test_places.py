"""Places whose number changes while some are taken."""

from __future__ import annotations

import asyncio

from dsec.reward.places import Places


class Crowd:
    """Who is in a place, and who wants one."""

    def __init__(self, count_max: int) -> None:
        self.places = Places(count_max)
        self.inside: list[int] = []
        self.leave = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, count: int) -> None:
        """So many come, and stay until they may leave."""
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._one(len(self.tasks))))
        await asyncio.sleep(0.01)

    async def _one(self, n: int) -> None:
        async with self.places:
            self.inside.append(n)
            await self.leave.wait()
        self.inside.remove(n)


async def test_those_inside_count_when_there_are_fewer_places() -> None:
    crowd = Crowd(3)
    await crowd.come(5)
    assert crowd.inside == [0, 1, 2]
    crowd.places.resize(3)
    await asyncio.sleep(0.01)
    assert crowd.inside == [0, 1, 2], "declared anew, there are not twice as many"
    crowd.places.resize(4)
    await asyncio.sleep(0.01)
    assert crowd.inside == [0, 1, 2, 3]
    crowd.places.resize(1)
    await crowd.come(1)
    assert len(crowd.inside) == 4
    crowd.leave.set()
    await asyncio.gather(*crowd.tasks)
    crowd.leave.clear()
    crowd.tasks.clear()
    await crowd.come(2)
    assert len(crowd.inside) == 1
    crowd.tasks[1].cancel()
    crowd.leave.set()
    await asyncio.gather(*crowd.tasks, return_exceptions=True)
    await asyncio.wait_for(crowd.places.__aenter__(), 1)


async def test_who_is_cancelled_with_a_place_gives_it_back() -> None:
    places = Places(1)
    await places.__aenter__()
    waits = asyncio.create_task(places.__aenter__())
    await asyncio.sleep(0)
    await places.__aexit__(None, None, None)  # it is the one's who waits now
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    await asyncio.wait_for(places.__aenter__(), 1)
