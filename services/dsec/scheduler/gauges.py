"""Numbers about the scheduler's state, for telemetry. Pure; read from an exporter's thread, so each
looks at a copy."""

from __future__ import annotations

from dsec.scheduler.state import SchedulerState

PERCENTILE = 0.95


def utilisation(state: SchedulerState) -> float | None:
    """Seats in use over seats of the workers that are ready; None: there are none."""
    ready = [worker for worker in list(state.workers.values()) if worker.ready]
    seats = sum(worker.capacity_sessions for worker in ready)
    return sum(len(worker.sessions) for worker in ready) / seats if seats else None


def workers_ready(state: SchedulerState) -> int:
    """Workers that may be given sessions."""
    return sum(worker.ready for worker in list(state.workers.values()))


def heartbeat_age_p95_s(state: SchedulerState, now_s: float) -> float | None:
    """The age of the last heartbeat that 95 % of the placed sessions do not exceed; None: no
    session is placed, or no worker was heard yet.

    Args:
        now_s: on the clock of the heartbeats.
    """
    ages = sorted(
        (now_s - worker.heard_at_s, len(worker.sessions))
        for worker in list(state.workers.values())
        if worker.sessions and worker.heard_at_s is not None
    )
    rank = PERCENTILE * sum(count for _, count in ages)
    for age_s, count in ages:
        rank -= count
        if rank <= 0:
            return age_s
    return None
