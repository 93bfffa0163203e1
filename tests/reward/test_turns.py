"""Turns at the scoring process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from dsec.reward.frames import Outcome, Task
from dsec.reward.turns import ROWS_A_TURN_MAX, TURN_BYTES_MAX, Turns


class Slow:
    """Functions that take a moment, whatever is asked."""

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.broken = False

    async def score(self, tasks: Sequence[Task], contents: Mapping[str, bytes]) -> list[Outcome]:
        self.turns.append(len(tasks))
        await asyncio.sleep(0.01)
        if self.broken:
            raise OSError("no process")
        return [task.fact + contents[task.spec] for task in tasks]


def _tasks(tick: int, rows: int) -> list[Task]:
    return [Task(f"s{tick % 2}", b"%d.%d" % (tick, n), b"", b"") for n in range(rows)]


async def test_ticks_that_come_meanwhile_go_in_one_turn() -> None:
    functions = Slow()
    turns = Turns(functions)
    found = await asyncio.gather(
        *[turns.score(_tasks(tick, 2), {f"s{tick % 2}": b"-%d" % (tick % 2)}) for tick in range(20)]
    )
    assert found == [[b"%d.%d-%d" % (t, n, t % 2) for n in range(2)] for t in range(20)]
    assert len(functions.turns) <= 2


async def test_a_turn_is_bounded() -> None:
    functions = Slow()
    found = await Turns(functions).score(_tasks(0, ROWS_A_TURN_MAX + 5), {"s0": b""})
    assert len(found) == ROWS_A_TURN_MAX + 5
    assert functions.turns == [ROWS_A_TURN_MAX, 5]


async def test_episodes_that_many_ticks_close_at_once_share_no_turn_that_is_too_large() -> None:
    functions = Slow()
    turns = Turns(functions)
    episode = Task("s0", b"", b"e" * (TURN_BYTES_MAX // 2), b"")  # one, in memory once
    await asyncio.gather(*[turns.score([episode] * 2, {"s0": b""}) for _ in range(4)])
    assert sum(functions.turns) == 8
    assert max(functions.turns) == 3


async def test_trouble_of_the_machine_reaches_all_of_a_turn() -> None:
    functions = Slow()
    functions.broken = True
    turns = Turns(functions)
    found = await asyncio.gather(
        *[turns.score(_tasks(0, 2), {"s0": b""}) for _ in range(3)], return_exceptions=True
    )
    assert [type(one) for one in found] == [OSError] * 3
    functions.broken = False
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(turns.score(_tasks(0, 1), {"s0": b""}), 0.001)
    assert await turns.score(_tasks(0, 1), {"s0": b""}) == [b"0.0"]
