"""Intents: what the decider wants done, in plain data.

A decider does no I/O, so it says what should be published and `effects.py` publishes it. Every
intent leads to events with a natural key, so one that is carried out twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from dsec_contracts.curriculum import ChangeReason
from dsec_contracts.session import RejectCode, RequestFact
from dsec_contracts.worker import Culprit, DeathReason

EndStatus = Literal["failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse a request, under the id of the event that asked."""

    event_id: str
    code: RejectCode
    field: str | None
    message: str
    session_id: str | None
    """As it was written, which need not be a session id."""
    facts: bytes = b""
    """Digest of the request, where its id is used up by it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Give a session to a lane of a worker.

    `expected_sequence` is the last sequence of the session's placements: of several racing
    schedulers the stream lets one through.
    """

    session_id: UUID
    worker: str
    lane: str
    attempt: int
    previous_lane: str | None
    alone: bool
    reason: str
    cause: str
    expected_sequence: int
    request: RequestFact
    heartbeat_period_s: float | None = None
    """The worker's, where it is not what it should be."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Give a worker up: first its publishes are refused, then everybody is told."""

    worker: str
    reason: DeathReason
    culprit: Culprit | None
    detail: str
    sessions: int


@dataclass(frozen=True, slots=True)
class End:
    """End a session that no worker has.

    `log_sequence` is what the log must have passed before the last step can be read from it; None
    where the session was never placed and so has no step.
    """

    session_id: UUID
    status: EndStatus
    code: str
    message: str
    attempt: int
    cause: str
    log_sequence: int | None


@dataclass(frozen=True, slots=True)
class RequestCancel:
    """Ask, in the stream, that a session past its deadline stop."""

    session_id: UUID
    code: Literal["deadline"]
    cause: str


@dataclass(frozen=True, slots=True)
class ChangeLevel:
    """Give a session another curriculum level from its next episode on; its `n`th change."""

    session_id: UUID
    n: int
    level: int
    previous_level: int
    why: ChangeReason
    lane: str
    cause: str
    lag_steps: int | None = None
    for_s: float | None = None
    episodes: int | None = None
    success_mean: float | None = None


Intent = Reject | Place | Fence | End | RequestCancel | ChangeLevel
