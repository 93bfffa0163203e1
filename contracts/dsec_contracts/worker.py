"""Events about workers: fenced by the scheduler, and their heartbeats, which are not logged."""

from __future__ import annotations

from typing import ClassVar, Literal
from uuid import UUID

from pydantic import Field

from dsec_contracts.envelope import Event, Part, Prose
from dsec_contracts.session import HeartbeatPeriod, Name

DeathReason = Literal["exit", "signal", "oom", "step_deadline", "heartbeat_lost", "drained"]


class Culprit(Part):
    """The session whose user code was running when a worker died, and at which step."""

    session_id: UUID
    step: int
    suspect_only: bool | None = None
    """True where SIGKILL ended the worker and nobody knows who sent it: an operator mostly, which
    says nothing of the code that ran, but perhaps what that code has started. The session is placed
    alone, and counts as crashed where it happens there again and again, at one step."""


class FencedFact(Part):
    """A worker's publishes after this position are refused."""

    worker: Name
    reason: DeathReason
    culprit: Culprit | None = None


class FencedCircumstance(Part):
    """Details for people."""

    detail: Prose = ""
    sessions: int = 0


class WorkerFenced(Event):
    """The scheduler gave a worker up."""

    fact: FencedFact
    circumstance: FencedCircumstance = FencedCircumstance()


class HeartbeatFact(Part):
    """A worker's state now. `dead` is said by its supervisor, until the fence is seen."""

    worker: Name
    node: Name
    state: Literal["ready", "draining", "dead"]
    lanes: list[Name] = Field(default_factory=list)
    capacity_sessions: int = 0
    isolated: bool = False
    """Takes one suspected session at a time."""
    death: DeathReason | None = None
    culprit: Culprit | None = None
    detail: Prose = ""


class HeartbeatCircumstance(Part):
    """What it does: parallel lists over its sessions, or over a part of them that moves on from
    beat to beat."""

    pid: int = 0
    memory_bytes: int = 0
    """The resident memory of the worker's process. 0: it is not known, or the worker is dead."""
    sessions: list[UUID] = Field(default_factory=list)
    attempts: list[int] = Field(default_factory=list)
    steps: list[int] = Field(default_factory=list)
    waiting_on: list[str] = Field(default_factory=list)
    """`tick`, `reward`, `log`, `start`; one a session."""
    reward_lag_steps: list[int] | None = Field(default=None, exclude_if=lambda lags: lags is None)
    """How many steps the oldest outstanding reward is behind, 0 where none is; one a session. None:
    no session here has a curriculum."""
    sessions_total: int | None = None
    """How many it has in all, those included that it has taken and not started yet. None: whoever
    beats does not say what the worker has, as its supervisor cannot."""
    placements_read: int | None = Field(default=None, exclude_if=lambda position: position is None)
    """The position in the stream up to which it has read placements: what lies behind it cannot
    have been lost."""
    period_s: HeartbeatPeriod | None = Field(default=None, exclude_if=lambda period: period is None)
    """How often it beats. None: it does not say."""


class WorkerHeartbeat(Event):
    """A worker is alive, or its supervisor says that it is dead. Not in the log."""

    durable: ClassVar[bool] = False

    fact: HeartbeatFact
    circumstance: HeartbeatCircumstance = HeartbeatCircumstance()
