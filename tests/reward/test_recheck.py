"""Functions that keep state between calls are found while sessions run, and named."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from tests.reward.conftest import Rig, facts, session, spec_of, step_fact

from dsec.platform.user_limits import UserLimits
from dsec.reward import turns
from dsec.reward.frames import Failure, Outcome, Task
from dsec.reward.isolation import Isolation
from dsec.reward.recheck import ROWS_BEFORE, Recheck
from dsec.reward.state import VALUE_BYTES_MAX, changed, snapshot

LIMITS = UserLimits(4 << 30, 4096, 4 << 30, 256)
SOUND = spec_of(
    "known = {}\n@dsec.reward()\ndef score(t, services):\n"
    "    return known.setdefault(t.step, t.step) + t.env_reward\n"
)
COUNTS = spec_of(
    "calls = 0\n@dsec.reward()\ndef score(t, services):\n"
    "    global calls\n    calls += 1\n    return calls\n"
)
REMEMBERS = spec_of(
    "@dsec.reward()\ndef score(t, services, seen=[]):\n    seen.append(1)\n    return len(seen)\n"
)
CLOSES_OVER = spec_of(
    "def make():\n    seen = []\n    def score(t, services):\n        seen.append(t.step)\n"
    "        return float(seen[0])\n    return score\nscore = make()\n"
)


def tasks_of(spec: tuple[str, bytes], count: int = 6) -> list[Task]:
    return [Task(spec[0], step_fact(n), b"", b"") for n in range(count)]


async def found_out(spec: tuple[str, bytes]) -> Failure | None:
    """What a check says of a function that has scored some rows in another process."""
    contents = dict([spec])
    main = Isolation(30, LIMITS)
    recheck = Recheck(lambda: Isolation(30, LIMITS, watches_state=True), lambda: 0.0, 60)
    try:
        tasks = tasks_of(spec)
        outcomes = await main.score(tasks, contents)
        failure = await recheck.differs(tasks, outcomes, contents)
        assert recheck.failure(spec[0]) is failure
        return failure
    finally:
        await main.close()


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (COUNTS, "global calls of reward"),
        (REMEMBERS, "default 0 of score"),
        (CLOSES_OVER, "closed-over seen of score"),
    ],
)
async def test_state_that_changes_a_reward_is_named(spec: tuple[str, bytes], told: str) -> None:
    failure = await found_out(spec)
    assert failure is not None
    assert (failure.code, failure.fatal) == ("reward_stateful", True)
    assert told in failure.message


class Weighed(Isolation):
    """Notes how many rows are scored at a time."""

    turns: ClassVar[list[int]] = []

    async def score(self, tasks: Sequence[Task], contents: Mapping[str, bytes]) -> list[Outcome]:
        self.turns.append(len(tasks))
        return await super().score(tasks, contents)


async def test_what_is_scored_again_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole episodes, a few are more than a request may have."""
    tasks = tasks_of(SOUND)
    monkeypatch.setattr(turns, "TURN_BYTES_MAX", len(tasks[0].fact) + 1)
    recheck = Recheck(lambda: Weighed(30, LIMITS, watches_state=True), lambda: 0.0, 60)
    main = Isolation(30, LIMITS)
    try:
        outcomes = await main.score(tasks, dict([SOUND]))
        assert await recheck.differs(tasks, outcomes, dict([SOUND])) is None
    finally:
        await main.close()
    assert Weighed.turns == [2]


async def test_a_cache_that_changes_no_reward_is_no_fault() -> None:
    assert await found_out(SOUND) is None


def test_when_rows_are_scored_again() -> None:
    now = 0.0
    recheck = Recheck(lambda: Isolation(30, LIMITS), lambda: now, 60)
    assert not recheck.is_due("a", ROWS_BEFORE - 1)
    assert recheck.is_due("a", 1)
    assert not recheck.is_due("a", 100)
    assert recheck.is_due("b", 100)
    now = 61.0
    assert recheck.is_due("a", 1)
    assert not Recheck(lambda: Isolation(30, LIMITS), lambda: now, 0).is_due("a", 100)


def test_what_a_snapshot_sees() -> None:
    counter: Any = Counter()
    ticks = itertools.count()
    large = bytearray(VALUE_BYTES_MAX + 1)

    def function(t: object, services: object, *, more: list[int] = []) -> int:  # noqa: B006
        return len(large) + next(ticks) + counter["x"]

    before = snapshot(function, "no_such_namespace")
    assert changed(before, snapshot(function, "no_such_namespace")) == []
    function.__kwdefaults__["more"].append(1)
    counter["x"] += 1
    next(ticks)
    function.mark = 1  # type: ignore[attr-defined]
    names = changed(before, snapshot(function, "no_such_namespace"))
    assert [name.partition(" of ")[0] for name in names] == [
        "attribute mark",
        "closed-over counter",
        "closed-over ticks",
        "default more",
    ]


@pytest.mark.nats
async def test_a_session_of_a_stateful_function_fails_and_others_do_not(rig: Rig) -> None:
    rig.know(COUNTS, SOUND)
    rig.start(recheck_s=60)
    specs = [COUNTS[0], SOUND[0]] * 4
    await rig.send(specs, "a")
    missing = await rig.missing(4)
    await rig.settled()
    assert {n: (e.fact.code, e.fact.fatal) for n, e in missing.items()} == {
        session(n): ("reward_stateful", True) for n in (0, 2, 4, 6)
    }
    assert "global calls" in missing[session(0)].circumstance.message
    assert {raw_id for raw_id, _ in facts(await rig.scored(1))} == {
        session(n).bytes for n in (1, 3, 5, 7)
    }
    await rig.send(specs, "b", step=1)
    await rig.settled()
    assert len(facts(await rig.scored(2))) == 8
    assert len(await rig.messages("reward.missing", 8)) == 8
