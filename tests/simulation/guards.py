"""The guards behind the promises, each with the way to take it away.

Some are the servers' (switches of the simulated ones), others our own code, which is replaced while
a run lasts. With every guard in its place no seed may fail; without any one of these, some must, or
nobody would know whether the simulation looks.

What is not here has been tried and is not missed, since something else stands behind it: that
messages are delivered again (lanes ask again), that rows behind a tail are left out (an input that
comes twice is ignored), that the facts of a row are compared (nothing differs, which the verdict
sees in the stream itself).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.faults import Fault, Plan
from tests.simulation.network import Weather
from tests.simulation.programs import undisturbed
from tests.simulation.switches import Switches

from dsec.env_runtime import replies
from dsec.env_runtime.lane import Lane
from dsec.recorder.effects import Feed, Item
from dsec.recorder.intake import read
from dsec.scheduler import overflow
from dsec.scheduler.handlers import Scheduler
from dsec.session.io import AWAITS_LATE
from dsec.session.late import Late
from dsec.session.machine import SessionMachine
from dsec.tool.telling import Teller

ALL = Switches()


@dataclass(frozen=True, slots=True)
class Guard:
    """A guard, and a seed that misses it."""

    missed_by: int
    switches: Switches = ALL
    remove: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    plan: Plan | None = None
    """What happens to it, where the plans of seeds seldom come to it."""


@contextlib.contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _replacing(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    return lambda: _instead(owner, name, value)


async def _nothing(*_: object, **__: object) -> None:
    return None


def _unnumbered(feed: Feed, message: Any) -> None:
    """`Feed._take` without a look at the number of the delivery."""
    if message.sequence > feed._last:
        feed._last = message.sequence
        feed._items.append(Item(message, read(message, feed._floor.epoch)))


def _whatever_comes(machine: SessionMachine, given: Any) -> Any:
    """`SessionMachine.deliver` of an input that may be due or not."""
    if machine.awaiting is not None and machine.awaiting >= 0 and machine.chain is not None:
        given = given._replace(ordinal=machine.awaiting, cause=machine.chain[:16])
    return _deliver(machine, given)


_deliver = SessionMachine.deliver


async def _nothing_pending(scheduler: Scheduler, consumer: Any, target: int) -> bool:
    """`Scheduler._has_all` that takes what is on its way for what is there."""
    return scheduler._position >= target or (await consumer.state()).pending == 0


@contextlib.contextmanager
def _a_state_behind_the_log() -> Iterator[None]:
    with (
        _instead(Scheduler, "_has_all", _nothing_pending),
        _instead(overflow, "known", lambda floor, reached: floor),
    ):
        yield


async def _fed_unnumbered(
    lane: Lane, consumer: Any, previous: str | None = None, after: int = 0
) -> None:
    """`replies.feed` without a look at the numbers of the deliveries."""
    while previous is None or lane.has_from(previous):
        for message in await consumer.fetch(1, 5.0):
            lane.take(message)


def _told_as_it_comes(machine: SessionMachine, given: Any) -> Any:
    """`SessionMachine._hear` that tells what is late at once, `lag_steps` or not."""
    late = machine._late
    if late is not None and (owed := late.find(given)) is not None:
        owed.given = given
        if (ended := machine._tell(late, owed, given)) is not None:
            return ended
        return machine._settle(late) if machine.awaiting == AWAITS_LATE else None
    return _hear(machine, given)


_hear = SessionMachine._hear


@contextlib.contextmanager
def _late_at_any_step() -> Iterator[None]:
    undisturbed.cache_clear()  # also those are run without the guard
    with _instead(SessionMachine, "_hear", _told_as_it_comes):
        yield
    undisturbed.cache_clear()


LATE = Plan(
    Weather(delay_s_max=0.01, slow_share=0.05, slow_s_max=3.0, until_s=12.0),
    duplicate_window_s=120.0,
    lost_commits_share=0.0,
    work_s_max=0.02,
    trim_keep_s=60.0,
    standby=("scheduler",),
    sessions=((0, 1, 2), (1, 1, 2)),
    asked_at_s=(0.03, 0.03),
)
"""Some of what a scheduler is sent takes seconds."""
ZOMBIES = Plan(
    Weather(),
    duplicate_window_s=120.0,
    lost_commits_share=0.0,
    work_s_max=0.5,
    trim_keep_s=60.0,
    standby=(),
    sessions=((4, 1, 12), (4, 2, 12), (4, 3, 12)),
    asked_at_s=(0.1, 0.1, 0.1),
    faults=tuple(Fault(0.8 + n / 100, "mute", "worker", 5.0) for n in range(3)),
)
"""Workers that nobody hears, and that go on with agents whose memory no other worker has."""
TWO_ANSWERS = Plan(
    Weather(),
    duplicate_window_s=0.0,
    lost_commits_share=0.0,
    work_s_max=0.5,
    trim_keep_s=60.0,
    standby=("tool",),
    sessions=((3, 1, 3), (3, 2, 3), (3, 3, 3), (3, 0, 3)),
    asked_at_s=(0.1, 0.1, 0.1, 0.1),
    faults=(
        Fault(0.7, "stop", "tool", 6.0),
        *(Fault(4.2 + n / 100, "deaf", "worker", 2.0) for n in range(4)),
    ),
)
"""A replica is stopped in the midst of calls, another says that nobody knows how they ended, which
is lost on its way, and the first one, woken, says how they did."""

UNHEARD = Plan(
    Weather(),
    duplicate_window_s=120.0,
    lost_commits_share=0.0,
    work_s_max=0.3,
    trim_keep_s=60.0,
    standby=(),
    sessions=((1, 1, 6), (1, 2, 6)),
    asked_at_s=(0.1, 0.1),
    faults=tuple(Fault(0.5 + n / 10, "deaf", "worker", 1.0) for n in range(4)),
)
"""Workers that rewards do not come to."""
DOUBLED = Plan(
    Weather(delay_s_max=0.05, lost_share=0.02, doubled_share=0.5, until_s=6.0),
    duplicate_window_s=0.0,
    lost_commits_share=0.0,
    work_s_max=0.1,
    trim_keep_s=60.0,
    standby=("reward",),
    sessions=((1, 1, 6), (2, 2, 6), (0, 1, 6)),
    asked_at_s=(0.1, 0.1, 0.1),
)
"""Half of all messages come twice, and no server remembers the first."""

SWITCHING = Plan(
    Weather(),
    duplicate_window_s=120.0,
    lost_commits_share=0.0,
    work_s_max=0.3,
    trim_keep_s=60.0,
    standby=("reward",),
    sessions=((5, 1, 8), (6, 1, 8), (7, 2, 8), (8, 2, 8)),
    asked_at_s=(0.1, 0.1, 0.1, 0.1),
    faults=(Fault(1.0, "kill", "worker"), Fault(1.6, "kill", "reward")),
    slow_s=((0.0, 6.0), (8.0, 12.0)),
)
"""Rewards are deferred and are not, while sessions are moved."""
SWITCHING_FREE = replace(SWITCHING, sessions=((5, 1, 8), (5, 2, 8), (7, 2, 8), (7, 3, 8)))
"""The same, all without `lag_steps`: with it, who does not wait steps for ever."""

GUARDS = {
    "the fence": Guard(6, Switches(fence=False), plan=ZOMBIES),
    "what a placement or a note of a call builds on": Guard(
        24, Switches(expected_sequence=False), plan=TWO_ANSWERS
    ),
    "natural keys": Guard(0, Switches(natural_key=False), plan=DOUBLED),
    "the wait for the floor": Guard(31, Switches(floor_wait=False)),
    "numbers of the recorder's deliveries": Guard(
        0, remove=_replacing(Feed, "_take", _unnumbered), plan=DOUBLED
    ),
    "what is not answered is asked again": Guard(
        0, remove=_replacing(Lane, "repeat_unanswered", lambda lane: None), plan=UNHEARD
    ),
    "a call that is begun is begun once": Guard(
        0, remove=_replacing(Teller, "begin", _nothing), plan=TWO_ANSWERS
    ),
    "an input is of one step": Guard(
        0, remove=_replacing(SessionMachine, "deliver", _whatever_comes), plan=DOUBLED
    ),
    "a scheduler knows what it decides about": Guard(90, remove=_a_state_behind_the_log, plan=LATE),
    "what is late is told at its step": Guard(0, remove=_late_at_any_step, plan=SWITCHING),
    "a session ends when all was told": Guard(
        0,
        remove=_replacing(Late, "lacks", lambda late, step, *, ending: False),
        plan=SWITCHING_FREE,
    ),
    "numbers of a lane's deliveries": Guard(
        0, remove=_replacing(replies, "feed", _fed_unnumbered), plan=TWO_ANSWERS
    ),
}
