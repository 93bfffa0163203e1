"""What the scheduler knows: sessions, workers, specs and policies, with the indexes it needs.

All of it is a fold of the log and the stream, so a scheduler that takes over has the same state.
Only `fold.py` and `in_flight.py` write here. Nothing scans all sessions: waiting ones are in
heaps, deadlines are in a heap, a worker has the set of its sessions and a count for each lane.

Sequences are positions in the stream. Those of an older epoch, whose stream is gone, are negative,
so that one integer orders everything.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Literal
from uuid import UUID

from dsec.platform.bounded import Bounded
from dsec.scheduler.curriculum import Curricula, Rules
from dsec_contracts.session import CancelCode, RequestFact
from dsec_contracts.spec import SpecCircumstance
from dsec_contracts.worker import Culprit, DeathReason

CLOSED_SESSIONS_MAX = 100_000
"""Ended and refused sessions that are remembered; older ones are looked up in the log."""
EARLY_CANCELS_MAX = 10_000
"""Cancels of sessions that are not in memory; older ones are looked up in the log."""
REJECTED_EVENTS_MAX = 100_000
"""Ids of rejected events that are remembered; a repeat of an older one is rejected again, under
the same key."""


@dataclass(slots=True)
class Session:
    """A session that has not ended."""

    request: RequestFact
    facts: bytes
    """Digest of the canonical request: what makes a repeated request the same."""
    position: int
    """Of its request: the order of the queue among equal priorities."""
    status: Literal["queued", "placed"] = "queued"
    attempt: int = 0
    worker: str | None = None
    lane: str | None = None
    previous_lane: str | None = None
    placed_sequence: int = 0
    """The last sequence of its placements: what the next placement must name."""
    moved_sequence: int = 0
    """Of the last event that placed it or took it from a worker."""
    cause: str = ""
    """The natural key of what put it into the queue."""
    reason: str = "admitted"
    services: tuple[str, ...] = ()
    """The outside services that its reward function asks."""
    deaths: dict[int, int] = field(default_factory=dict)
    """Deaths of workers that it caused, by step."""
    killed_at_step: int | None = None
    killed_alone: int = 0
    """How often in a row, at this step, SIGKILL ended a worker that it had to itself."""
    death_reason: DeathReason | None = None
    restarts: int = 0
    bystander_deaths: int = 0
    moves: int = 0
    """How often a worker gave it back, or went in good order."""
    alone: bool = False
    cancel: CancelCode | None = None
    in_flight: Literal["place", "end"] | None = None
    """What was issued for it and has not come back on the stream."""
    cancel_in_flight: bool = False

    @property
    def session_id(self) -> UUID:
        """Its id."""
        return self.request.session_id


@dataclass(frozen=True, slots=True)
class Death:
    """What a supervisor says of a dead worker."""

    reason: DeathReason
    culprit: Culprit | None
    detail: str


@dataclass(frozen=True, slots=True)
class Absence:
    """Since when a worker has not named a session that was placed on it."""

    since_s: float
    """On the clock of the heartbeats."""
    since_rounds: float
    """In rounds of its beats over all that it has."""


@dataclass(slots=True)
class Worker:
    """A worker that is not fenced."""

    name: str
    node: str = ""
    lanes: tuple[str, ...] = ()
    capacity_sessions: int = 0
    isolated: bool = False
    ready: bool = False
    heard_at_s: float | None = None
    """On a monotonic clock; None where it is known from the log alone."""
    period_s: float | None = None
    """How often it beats, as it says. None: it does not, or as often as it should."""
    death: Death | None = None
    sessions: set[UUID] = field(default_factory=set)
    """Those it has, and those whose placement is in flight."""
    lane_counts: dict[str, int] = field(default_factory=dict)
    lane_callers: dict[str, int] = field(default_factory=dict)
    """Of these, those that ask outside services."""
    rounds: float = 0.0
    """How often it has named all of its sessions, by the parts that each beat has room for."""
    placements_read: int | None = None
    """The position up to which it has read placements, as it says. None: it does not say."""
    absent: dict[UUID, Absence] = field(default_factory=dict)
    """Those it has by the stream and has not named since, the longest first."""
    fence_in_flight: bool = False


def _waits(session: Session, found: Mapping[UUID, Session]) -> bool:
    fresh = session.session_id not in found
    return fresh and session.status == "queued" and session.in_flight is None


def _queue_of(session: Session) -> tuple[str, ...] | None:
    return None if session.alone else session.services


class SchedulerState:
    """The state object. `listening_since_s`: since when heartbeats could have been heard."""

    def __init__(self, listening_since_s: float = 0.0, rules: Rules | None = None) -> None:
        self.curricula = Curricula(rules or Rules())
        self.specs: dict[str, str] = {}
        self.policies: set[str] = set()
        self.asked: dict[str, tuple[str, ...]] = {}
        """Reward specs whose functions ask outside services, and which."""
        self.per_episode: set[str] = set()
        """Reward specs whose functions score whole episodes."""
        self.budgets: dict[str, tuple[int, float]] = {}
        """Of declared services: the version of the declaration and requests a second."""
        self.callers: Counter[str] = Counter()
        """By service: sessions on a worker that ask it."""
        self.sessions: dict[UUID, Session] = {}
        self.workers: dict[str, Worker] = {}
        self.fenced: set[str] = set()
        self.closed: Bounded[UUID, bytes] = Bounded(CLOSED_SESSIONS_MAX)
        """Ended sessions: the digest of their request, or b"" where it is not known."""
        self.refused: Bounded[UUID, bytes] = Bounded(CLOSED_SESSIONS_MAX)
        """Sessions whose one request was refused: the digest of that request."""
        self.rejected_events: Bounded[str, bytes] = Bounded(REJECTED_EVENTS_MAX)
        self.early_cancels: Bounded[UUID, bytes] = Bounded(EARLY_CANCELS_MAX)
        self.listening_since_s = listening_since_s
        self.followed_until_s = listening_since_s
        """All that the stream had by then is in here; on the clock of the heartbeats."""
        self.heard_until_s = inf
        """All heartbeats that the server had by then were heard."""
        self.review: set[UUID] = set()
        """Queued sessions that may have to end instead of being placed."""
        self.queued = 0
        self._queues: dict[tuple[str, ...] | None, list[tuple[int, int, UUID]]] = {}
        """By the services that are asked, so that those whose service is busy hold up no others;
        under None those that must be alone."""
        self._deadlines: list[tuple[datetime, UUID]] = []

    def registered(self, spec_hash: str, kind: str, told: SpecCircumstance) -> None:
        """A spec became known. What a hash names never changes."""
        self.specs.setdefault(spec_hash, kind)
        if told.services:
            self.asked.setdefault(spec_hash, tuple(sorted(told.services)))
        if told.per_episode:
            self.per_episode.add(spec_hash)

    def declared(self, service: str, version: int, qps_budget: float) -> None:
        """A service has a budget. The highest version counts."""
        known, _ = self.budgets.get(service, (0, 0.0))
        if version > known:
            self.budgets[service] = version, qps_budget

    # -- the queue -----------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        """A session became known; it waits."""
        self.sessions[session.session_id] = session
        request = session.request
        self.curricula.add(
            session.session_id,
            request.agent_spec,
            request.curriculum_level,
            session.position,
            per_episode=request.reward_fn_hash in self.per_episode,
        )
        self.watch(session)
        self.queued += 1
        self.push(session)

    def push(self, session: Session) -> None:
        """Put a waiting session where the next placement finds it."""
        entry = (-session.request.priority, session.position, session.session_id)
        heapq.heappush(self._queues.setdefault(_queue_of(session), []), entry)

    def first(
        self, alone: bool, count: int, room: Mapping[str, int] | None = None
    ) -> list[Session]:
        """The first `count` waiting sessions, without those in review. The queues stay as they are,
        but for entries that no longer wait, which are dropped here.

        Args:
            room: how many more sessions may ask a service; one that is not named has no bound.
        """
        left = dict(room or {})
        heads = [(q[0], k) for k, q in self._queues.items() if q and (k is None) == alone]
        heads.sort(key=lambda head: head[0])
        found: dict[UUID, Session] = {}
        kept = []
        while heads and len(found) < count:
            entry, key = heads[0]
            if any(left.get(name, 1) <= 0 for name in key or ()):
                heapq.heappop(heads)  # all of this queue ask the same
                continue
            queue = self._queues[key]
            heapq.heappop(queue)
            session = self.sessions.get(entry[2])
            if session is not None and _queue_of(session) == key and _waits(session, found):
                kept.append((key, entry))
                if entry[2] not in self.review:
                    found[entry[2]] = session
                    left.update((name, left[name] - 1) for name in key or () if name in left)
            if queue:
                heapq.heapreplace(heads, (queue[0], key))
            else:
                heapq.heappop(heads)
        for key, entry in kept:
            heapq.heappush(self._queues[key], entry)
        return list(found.values())

    def watch(self, session: Session) -> None:
        """Look at the session when its deadline has passed."""
        if session.request.deadline is not None:
            heapq.heappush(self._deadlines, (session.request.deadline, session.session_id))

    def overdue(self, now: datetime) -> list[Session]:
        """Open sessions past their deadline that nobody has asked to stop. Entries of others are
        dropped here."""
        found: dict[UUID, Session] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            session = self.sessions.get(heapq.heappop(self._deadlines)[1])
            if session is None or session.cancel is not None or session.cancel_in_flight:
                continue
            if session.in_flight != "end":
                found[session.session_id] = session
        for session in found.values():
            self.watch(session)
        return list(found.values())

    # -- where sessions are --------------------------------------------------------------------

    def lane_of(self, session_id: UUID) -> str | None:
        """The lane that a session is on, as the stream has it; None: it is on none."""
        session = self.sessions.get(session_id)
        return None if session is None or session.status == "queued" else session.lane

    def attach(self, session: Session, worker: str, lane: str) -> None:
        """Count a session on a worker's lane, placed or about to be."""
        self.detach(session)
        session.worker, session.lane = worker, lane
        entry = self.workers.get(worker)
        if entry is None:
            entry = self.workers[worker] = Worker(worker)
        entry.sessions.add(session.session_id)
        entry.lane_counts[lane] = entry.lane_counts.get(lane, 0) + 1
        if session.services:
            entry.lane_callers[lane] = entry.lane_callers.get(lane, 0) + 1
            self.callers.update(session.services)

    def detach(self, session: Session) -> None:
        """The session is on no worker any more."""
        entry = self.workers.get(session.worker or "")
        if entry is not None and session.session_id in entry.sessions:
            entry.sessions.discard(session.session_id)
            entry.absent.pop(session.session_id, None)
            entry.lane_counts[session.lane or ""] -= 1
            if session.services:
                entry.lane_callers[session.lane or ""] -= 1
        if session.worker is not None:
            self.callers.subtract(session.services)
        session.worker = session.lane = None

    def mark_placed(self, session: Session) -> None:
        """It no longer waits."""
        if session.status == "queued":
            session.status = "placed"
            self.queued -= 1

    def requeue(self, session: Session) -> None:
        """It lost its worker and waits again."""
        if session.status == "placed":
            session.status = "queued"
            self.queued += 1
        session.previous_lane = session.lane or session.previous_lane
        self.detach(session)
        self.review.add(session.session_id)
        self.push(session)

    def forget(self, session: Session) -> None:
        """It is no session after all, or none any more."""
        del self.sessions[session.session_id]
        self.queued -= session.status == "queued"
        self.detach(session)
        self.review.discard(session.session_id)
        self.curricula.forget(session.session_id)

    def close(self, session_id: UUID, facts: bytes = b"") -> None:
        """It has ended."""
        session = self.sessions.get(session_id)
        if session is not None:
            facts = session.facts
            self.forget(session)
        self.early_cancels.pop(session_id, None)
        self.closed.remember(session_id, facts or self.closed.get(session_id, b""))
