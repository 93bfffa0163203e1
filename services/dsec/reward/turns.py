"""Turns at the scoring process: it takes one request at a time.

Rows wait for theirs together: all that are ready when it comes go in one, those of ticks that came
meanwhile and those that run again with what services have answered since. So many small ticks take
few turns, and none waits for as many as came before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from dsec.reward.frames import Outcome, Task

ROWS_A_TURN_MAX = 1024
"""Of all ticks together: what comes meanwhile waits for no more than these."""
TURN_BYTES_MAX = 256 << 20
"""Of the rows of a turn, all ticks together, but for the last: any of them may be a whole episode.
With it they are far from `FRAME_BYTES_MAX`, beyond which a request cannot be sent."""


class Functions(Protocol):
    """Runs users' functions: `Isolation`."""

    async def score(
        self, tasks: Sequence[Task], contents: Mapping[str, bytes]
    ) -> list[Outcome]: ...


class Turns:
    """One scoring process, shared by all ticks at hand."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._turn = asyncio.Lock()
        self._ready: list[tuple[Task, bytes, asyncio.Future[Outcome]]] = []

    async def score(self, tasks: Sequence[Task], contents: Mapping[str, bytes]) -> list[Outcome]:
        """The outcomes of rows, in one turn, with others."""
        loop = asyncio.get_running_loop()
        outcomes: list[asyncio.Future[Outcome]] = [loop.create_future() for _ in tasks]
        for task, outcome in zip(tasks, outcomes, strict=True):
            self._ready.append((task, contents[task.spec], outcome))
        async with self._turn:
            while not all(outcome.done() for outcome in outcomes):
                await self._score_ready()
        return list(await asyncio.gather(*outcomes))

    async def again(self, task: Task, content: bytes) -> Outcome:
        """The outcome of a row that runs again, in a turn with others."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._ready.append((task, content, outcome))
        async with self._turn:
            while not outcome.done():
                await self._score_ready()
        return await outcome

    async def _score_ready(self) -> None:
        count = rows_of_turn([task for task, _, _ in self._ready[:ROWS_A_TURN_MAX]])
        ready, self._ready = self._ready[:count], self._ready[count:]
        contents = {task.spec: content for task, content, _ in ready}
        try:
            found = await self._functions.score([task for task, _, _ in ready], contents)
        except BaseException as error:
            for _, _, outcome in ready:
                if not outcome.done():
                    outcome.set_exception(_as_exception(error))
            if not isinstance(error, Exception):
                raise
            return
        for (_, _, outcome), one in zip(ready, found, strict=True):
            if not outcome.done():
                outcome.set_result(one)


def rows_of_turn(ready: Sequence[Task]) -> int:
    """How many of the rows that are ready go in one turn."""
    size = 0
    for count, (_, fact, prior, observation, responses) in enumerate(ready, 1):
        size += len(fact) + len(prior) + len(observation) + len(responses)
        if size > TURN_BYTES_MAX:
            return count
    return len(ready)


class TurnLost(Exception):
    """Whoever had the turn was stopped: the rows are asked for again."""


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else TurnLost(repr(error))
