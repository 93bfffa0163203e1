"""What a worker says of itself: that it lives, what room it has, and how far each session is.

Of more sessions than one heartbeat has room for, each beat names a part, and the next one the part
behind it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple
from uuid import UUID

from dsec.env_runtime.memory import resident_bytes
from dsec.env_runtime.roster import Roster
from dsec.platform.bus import Author
from dsec_contracts import WorkerHeartbeat
from dsec_contracts.worker import HeartbeatCircumstance, HeartbeatFact

SESSIONS_MAX = 2_000
"""Of one heartbeat."""


class Told(NamedTuple):
    """What a heartbeat says of one session."""

    session_id: UUID
    attempt: int
    steps: int
    waiting_on: str
    reward_lag_steps: int


def told_of(roster: Roster) -> list[Told]:
    """What there is to say of every session of a worker."""
    told = [
        Told(
            session_id,
            seat.placed.attempt,
            seat.machine.steps,
            seat.waiting_on,
            seat.reward_lag_steps,
        )
        for session_id, seat in roster.seats.items()
    ]
    told += [
        Told(session_id, event.fact.attempt, 0, "start", 0)
        for session_id, event in roster.opening.items()
    ]
    return told


def window(told: list[Told], beat: int) -> list[Told]:
    """The part that a beat names: a window that moves on with every beat."""
    if len(told) <= SESSIONS_MAX:
        return told
    at = (beat * SESSIONS_MAX) % len(told)
    return (told[at:] + told[:at])[:SESSIONS_MAX]


class Heartbeats:
    """Publishes the heartbeats of one worker."""

    def __init__(
        self,
        author: Author,
        roster: Roster,
        *,
        worker: str,
        node: str,
        lanes: Sequence[str],
        capacity_sessions: int,
        isolated: bool,
        period_s: float,
    ) -> None:
        self._author = author
        self._roster = roster
        self._worker = worker
        self._node = node
        self._lanes = list(lanes)
        self._capacity_sessions = capacity_sessions
        self._isolated = isolated
        self._period_s = period_s
        self._beats = 0

    async def beat(self, state: Literal["ready", "draining"], placements_read: int) -> None:
        """One heartbeat.

        Args:
            placements_read: the position up to which the worker has read placements.
        """
        self._beats += 1
        all_told = told_of(self._roster)
        learns = any(seat.has_curriculum for seat in self._roster.seats.values())
        told = window(all_told, self._beats)
        fact = HeartbeatFact(
            worker=self._worker,
            node=self._node,
            state=state,
            lanes=self._lanes,
            capacity_sessions=self._capacity_sessions,
            isolated=self._isolated,
        )
        circumstance = HeartbeatCircumstance(
            pid=os.getpid(),
            memory_bytes=resident_bytes() or 0,
            sessions=[one.session_id for one in told],
            attempts=[one.attempt for one in told],
            steps=[one.steps for one in told],
            waiting_on=[one.waiting_on for one in told],
            reward_lag_steps=[one.reward_lag_steps for one in told] if learns else None,
            sessions_total=len(all_told),
            placements_read=placements_read,
            period_s=self._period_s,
        )
        await self._author.publish_transient(
            WorkerHeartbeat(fact=fact, circumstance=circumstance),
            self._worker,
            f"{self._worker}.beat.{self._beats}",
        )
