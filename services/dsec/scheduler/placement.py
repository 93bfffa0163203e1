"""Placement: which waiting session goes to which lane of which worker.

A placement rule is a pure function over a snapshot, so that it runs unchanged in a simulator. It
knows nothing of the stream, the log or the clock, and never changes the snapshot.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

LANE_FILL_SESSIONS = 256
"""A lane takes so many sessions before the next lane of its worker gets any. A tick is a message,
to the log and to the reward service and back, and most of what that costs is not its rows'."""
LANES_WITH_CALLERS_MIN = 3
"""A worker that has so many lanes keeps one for sessions that wait for outside services, also while
it has none of these: two are left to hide each other's waits."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A session that waits for a place. `alone`: it may share its worker with no other. `calls`:
    its rewards come from outside services, so that its steps take as long as these do."""

    session_id: UUID
    alone: bool = False
    calls: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker that takes sessions, and what it has.

    `lanes` are pairs of lane and number of sessions in it; `callers` of these are sessions that
    wait for outside services, by lane where there are any. `isolated`: takes one suspected session
    at a time and nothing else. `held`: the session it has must stay alone.
    """

    name: str
    lanes: tuple[tuple[str, int], ...]
    capacity_sessions: int
    isolated: bool = False
    held: bool = False
    callers: tuple[tuple[str, int], ...] = ()

    @property
    def sessions(self) -> int:
        """How many sessions it has."""
        return sum(count for _, count in self.lanes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a rule decides over. `queue` is in the order in which sessions should be served."""

    queue: tuple[Waiting, ...]
    workers: tuple[WorkerLoad, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A session's place."""

    session_id: UUID
    worker: str
    lane: str


Rule = Callable[[Snapshot], list[Assignment]]


def round_robin(snapshot: Snapshot) -> list[Assignment]:
    """Spread sessions evenly over workers, and within each fill one lane after the other.

    Lanes are filled by `LANE_FILL_SESSIONS` at a time: the one with the fewest such portions first,
    then the least loaded worker, then by name, so that equal snapshots give equal assignments.

    Sessions that wait for outside services are spread over the workers by themselves, and where a
    worker has more than one lane they share one there, which the others avoid: a tick waits for its
    slowest row, if only for `lane_wait_ms`. Where there are `LANES_WITH_CALLERS_MIN`, others that
    came first are not in it either.
    """
    others_wait = not all(waiting.alone for waiting in snapshot.queue)
    alone = _places_alone(snapshot.workers, others_wait)
    assignments: list[Assignment] = []
    taken: set[str] = set()
    ordinary: list[Waiting] = []
    for waiting in snapshot.queue:
        if not waiting.alone:
            ordinary.append(waiting)
        elif (place := next(alone, None)) is not None:
            taken.add(place[0])
            assignments.append(Assignment(waiting.session_id, *place))
    shared = [
        worker
        for worker in snapshot.workers
        if not (worker.isolated or worker.held or worker.name in taken)
    ]
    places = _SharedPlaces(shared, ordinary)
    for waiting in ordinary:
        if (found := places.take(waiting.calls)) is not None:
            assignments.append(Assignment(waiting.session_id, *found))
    return assignments


def _places_alone(workers: Iterable[WorkerLoad], others_wait: bool) -> Iterator[tuple[str, str]]:
    """Empty workers for suspected sessions. Isolated ones are there for this. Only where there is
    none at all do ordinary ones serve, so that a suspect never waits for ever; but never the last
    one that others could have, since a suspect holds all of it."""
    fit = [worker for worker in workers if worker.capacity_sessions > 0 and worker.lanes]
    serving = [worker for worker in fit if worker.isolated]
    if not serving:
        open_to_all = sum(not worker.held for worker in fit)
        empty = [worker for worker in fit if worker.sessions == 0 and not worker.held]
        serving = empty[: open_to_all - 1] if others_wait else empty
    for worker in sorted(serving, key=lambda worker: worker.name):
        if worker.sessions == 0 and not worker.held:
            yield worker.name, min(lane for lane, _ in worker.lanes)


class _SharedPlaces:
    """Places in the order in which they should be filled, each counted as it is given out."""

    def __init__(self, workers: Sequence[WorkerLoad], waiting: Sequence[Waiting]) -> None:
        self._loads = {worker.name: worker.sessions for worker in workers}
        self._capacities = {worker.name: worker.capacity_sessions for worker in workers}
        self._counts = {
            (worker.name, lane): count for worker in workers for lane, count in worker.lanes
        }
        any_calls = any(one.calls for one in waiting)
        theirs = {
            worker.name: _lane_of_callers(worker)
            for worker in workers
            if worker.lanes
            and (any_calls or worker.callers or len(worker.lanes) >= LANES_WITH_CALLERS_MIN)
        }
        others = [
            key
            for worker in workers
            for key in ((worker.name, lane) for lane, _ in worker.lanes)
            if len(worker.lanes) == 1 or theirs.get(worker.name) != key[1]
        ]
        self._callers = {worker.name: sum(n for _, n in worker.callers) for worker in workers}
        self._quiet = [self._entry(key) for key in others]
        self._calling = [
            (self._callers[name], self._loads[name], name, lane) for name, lane in theirs.items()
        ]
        heapq.heapify(self._quiet)
        heapq.heapify(self._calling)

    def _entry(self, key: tuple[str, str]) -> tuple[int, int, str, str]:
        return self._counts[key] // LANE_FILL_SESSIONS, self._loads[key[0]], *key

    def take(self, calls: bool) -> tuple[str, str] | None:
        """The next place, worker and lane; None: there is none."""
        heap = self._calling if calls else self._quiet
        while heap:
            first, load, name, lane = heapq.heappop(heap)
            if self._loads[name] >= self._capacities[name]:
                continue
            if load != self._loads[name]:  # its worker took a session meanwhile
                heapq.heappush(heap, (first, self._loads[name], name, lane))
                continue
            self._loads[name] += 1
            self._counts[name, lane] += 1
            if calls:
                heapq.heappush(heap, (first + 1, self._loads[name], name, lane))
            else:
                heapq.heappush(heap, self._entry((name, lane)))
            return name, lane
        return None


def _lane_of_callers(worker: WorkerLoad) -> str:
    """The lane that has most of them already; where none has any the emptiest, of equal ones the
    last, since the first is filled first."""
    callers = dict(worker.callers)
    lane, _ = max(worker.lanes, key=lambda entry: (callers.get(entry[0], 0), -entry[1], entry[0]))
    return lane


RULES: dict[str, Rule] = {"round_robin": round_robin}
"""The rules there are, by the name they have in `scheduler.config.yaml`."""

RESERVED_RULES = ("reward_variance_aware", "fair_share")
"""Rules that are named in the design and not built yet."""
