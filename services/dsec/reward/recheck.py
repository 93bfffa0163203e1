"""A sample of rows is scored again, in a process that has scored nothing else.

A function that keeps state between calls (a counter, a cache that changes the value) gives another
reward there. It is found now and then, as a session runs, and not only when somebody verifies it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from dsec.platform.bounded import Bounded
from dsec.reward.frames import Failure, Needs, Outcome, Task
from dsec.reward.isolation import Isolation, Untried
from dsec.reward.scorer import ScoringUnavailable
from dsec.reward.turns import rows_of_turn

log = logging.getLogger(__name__)

SAMPLE_ROWS_MAX = 4
ROWS_BEFORE = 2
"""A process that has scored fewer rows of a spec may be where a fresh one is."""
SPECS_MAX = 1024
MACHINE_CODES = frozenset(("reward_deadline", "reward_crashed"))
"""What may happen to any function in a process of its own, on a busy machine."""


class Recheck:
    """What this replica knows of functions and their state."""

    def __init__(
        self, fresh: Callable[[], Isolation], clock: Callable[[], float], period_s: float
    ) -> None:
        """Prepare.

        Args:
            fresh: starts a scoring process that has scored nothing, and says what changed in it.
            period_s: how often the rows of one spec are scored again; 0: never.
        """
        self._fresh = fresh
        self._clock = clock
        self._period_s = period_s
        self._rows: Bounded[str, int] = Bounded(SPECS_MAX)
        self._checked: Bounded[str, float] = Bounded(SPECS_MAX)
        self._stateful: Bounded[str, Failure] = Bounded(SPECS_MAX)
        self._turn = asyncio.Lock()

    def failure(self, spec: str) -> Failure | None:
        """Why no row of a spec has a reward, once that is known."""
        return self._stateful.get(spec)

    def is_due(self, spec: str, rows: int) -> bool:
        """Note that rows were scored, and say whether some of them are to be scored again."""
        total = self._rows.get(spec, 0) + rows
        self._rows.remember(spec, total)
        now = self._clock()
        if not self._period_s or total < ROWS_BEFORE:
            return False
        if now - self._checked.get(spec, float("-inf")) < self._period_s:
            return False
        self._checked.remember(spec, now)
        return True

    async def differs(
        self, tasks: Sequence[Task], outcomes: Sequence[Outcome], contents: Mapping[str, bytes]
    ) -> Failure | None:
        """Score rows of one spec again, the last ones first. A failure: they came out otherwise."""
        sample = list(zip(tasks, outcomes, strict=True))[-SAMPLE_ROWS_MAX:][::-1]
        sample = sample[: rows_of_turn([task for task, _ in sample])]
        again = [task for task, _ in sample]
        async with self._turn:
            process = self._fresh()
            try:
                found = await process.score(again, contents)
                changed = process.changed
            except ScoringUnavailable as error:
                log.warning("rows were not scored again: %s", error)
                return None
            finally:
                await process.close()
        pairs = zip((outcome for _, outcome in sample), found, strict=True)
        if not any(_is_other(one, other) for one, other in pairs):
            return None
        spec = tasks[0].spec
        failure = Failure("reward_stateful", _told(changed.get(spec, [])))
        log.error("reward spec %s: %s", spec, failure.message)
        self._stateful.remember(spec, failure)
        return failure


def _is_other(one: Outcome, other: Outcome) -> bool:
    if isinstance(other, Untried) or (isinstance(other, Failure) and other.code in MACHINE_CODES):
        return False
    if isinstance(one, (Failure, Needs)) or isinstance(other, (Failure, Needs)):
        return type(one) is not type(other)
    return bytes(one) != bytes(other)


def _told(changed: Sequence[str]) -> str:
    what = f" What changed between calls: {', '.join(changed)}." if changed else ""
    return (
        "the reward function keeps state between calls: scored again in a process of its own, a "
        "step has another reward. It must depend on the transition and the responses of services "
        f"alone.{what}"
    )
