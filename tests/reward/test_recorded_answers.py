"""Scored anew from what services answered before: each time what it was told that time."""

from __future__ import annotations

from typing import cast

from tests.reward.conftest import observation, spec_of, step_fact

from dsec.platform.bus import Bus
from dsec.reward.asking import Asking, Outsides
from dsec.reward.declarations import Declarations
from dsec.reward.frames import Needs, Outcome, Task
from dsec.reward.reexecution import Asks, Known, request_hash
from dsec.reward.rescoring import _by_request
from dsec.reward.score import load_scorer
from dsec.reward.services import Request

NEXT = Request("stock", "POST", "/next", (), None)
THRICE = spec_of(
    "@dsec.reward(services=['stock'])\n"
    "async def score(t, services):\n"
    "    a, b = await services.gather(*[services['stock'].post('/next')] * 2)\n"
    "    c = await services['stock'].post('/next')\n"
    "    return {'a': a.json(), 'b': b.json(), 'c': c.json()}\n"
)


def _answer(ordinal: int) -> Known:
    return Known(*NEXT[:3], request_hash(NEXT), ordinal, 200, {}, str(ordinal + 1).encode())


async def test_a_request_that_was_made_again_gets_the_answer_of_that_time() -> None:
    scorer = load_scorer(*THRICE)
    task = Task(THRICE[0], step_fact(), observation(0), observation(1))

    async def again(task: Task) -> Outcome:
        given = task.fact, task.observation, task.next_observation, task.responses
        try:
            return scorer.score(*given).body()
        except Asks as asks:
            return Needs(asks.requests)

    first = await again(task)
    assert isinstance(first, Needs)
    # Whatever is not recorded would be asked on the bus that is not there.
    outsides = Outsides(cast(Bus, None), cast(Declarations, None), "r", {}, lambda: 0.0)
    for count, expected in ((3, [1.0, 2.0, 3.0]), (2, [1.0, 2.0, 2.0])):
        answers = _by_request([_answer(n) for n in range(count)])
        row = Asking(task, first, "key", 0, True, frozenset([NEXT.service]), recorded=answers)
        found = await outsides.answer(row, again)
        scored = scorer.score(task.fact, task.observation, task.next_observation, found.responses)
        assert [score for score, _ in scored.components.values()] == expected
        assert found.outcome == scored.body()
