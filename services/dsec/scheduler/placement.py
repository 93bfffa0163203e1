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


@dataclass(frozen=True, slots=True)
class Waiting:
    """A session that waits for a place. `alone`: it may share its worker with no other."""

    session_id: UUID
    alone: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker that takes sessions, and what it has.

    `lanes` are pairs of lane and number of sessions in it. `isolated`: takes one suspected session
    at a time and nothing else. `held`: the session it has must stay alone.
    """

    name: str
    lanes: tuple[tuple[str, int], ...]
    capacity_sessions: int
    isolated: bool = False
    held: bool = False

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
    """
    others_wait = not all(waiting.alone for waiting in snapshot.queue)
    alone = _places_alone(snapshot.workers, others_wait)
    assignments: list[Assignment] = []
    taken: set[str] = set()
    ordinary: list[UUID] = []
    for waiting in snapshot.queue:
        if not waiting.alone:
            ordinary.append(waiting.session_id)
        elif (place := next(alone, None)) is not None:
            taken.add(place[0])
            assignments.append(Assignment(waiting.session_id, *place))
    shared = [
        worker
        for worker in snapshot.workers
        if not (worker.isolated or worker.held or worker.name in taken)
    ]
    for session_id, place in zip(ordinary, _places_shared(shared), strict=False):
        assignments.append(Assignment(session_id, *place))
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


def _places_shared(workers: Sequence[WorkerLoad]) -> Iterator[tuple[str, str]]:
    """Places in the order in which they should be filled, each counted as it is given out."""
    loads = {worker.name: worker.sessions for worker in workers}
    capacities = {worker.name: worker.capacity_sessions for worker in workers}
    counts = {(worker.name, lane): count for worker in workers for lane, count in worker.lanes}
    heap = [
        (count // LANE_FILL_SESSIONS, loads[name], name, lane)
        for (name, lane), count in counts.items()
    ]
    heapq.heapify(heap)
    while heap:
        portions, load, name, lane = heapq.heappop(heap)
        if loads[name] >= capacities[name]:
            continue
        if load != loads[name]:  # another lane of this worker took a session meanwhile
            heapq.heappush(heap, (portions, loads[name], name, lane))
            continue
        loads[name] += 1
        counts[name, lane] += 1
        heapq.heappush(heap, (counts[name, lane] // LANE_FILL_SESSIONS, loads[name], name, lane))
        yield name, lane


RULES: dict[str, Rule] = {"round_robin": round_robin}
"""The rules there are, by the name they have in `scheduler.config.yaml`."""

RESERVED_RULES = ("reward_variance_aware", "fair_share")
"""Rules that are named in the design and not built yet."""
