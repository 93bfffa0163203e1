"""What was issued and has not come back on the stream.

The state follows from the stream, which shows what was published a little later. Until then an
intent is marked as in flight, so that it is not issued again; what came to nothing is due again.
"""

from __future__ import annotations

from uuid import UUID

from dsec.scheduler.intents import ChangeLevel, End, Fence, Intent, Place, Reject, RequestCancel
from dsec.scheduler.state import SchedulerState


def issued(state: SchedulerState, intent: Intent) -> None:
    """Mark an intent as in flight, until what it leads to is seen on the stream."""
    match intent:
        case Reject(event_id=event_id, session_id=session_id, facts=facts):
            state.rejected_events.remember(event_id, b"")
            if facts and session_id is not None:
                state.refused.remember(UUID(session_id), facts)
        case Place(session_id=placed_id, worker=worker, lane=lane):
            session = state.sessions[placed_id]
            session.in_flight = "place"
            state.attach(session, worker, lane)
        case Fence(worker=worker):
            state.workers[worker].fence_in_flight = True
        case End(session_id=ended_id):
            state.sessions[ended_id].in_flight = "end"
        case RequestCancel(session_id=cancelled_id):
            state.sessions[cancelled_id].cancel_in_flight = True
        case ChangeLevel():
            state.curricula.issued(intent)


def withdrawn(state: SchedulerState, intent: Intent, placed_sequence: int | None = None) -> None:
    """An intent came to nothing and may be issued again.

    Args:
        placed_sequence: the last sequence of the session's placements, where the placement was
            refused since the state had another one.
    """
    match intent:
        case Place(session_id=session_id) | End(session_id=session_id):
            session = state.sessions.get(session_id)
            if session is None or session.in_flight is None:
                return  # the stream was faster
            session.in_flight = None
            if session.status == "queued":
                state.detach(session)
                state.review.add(session_id)
                state.push(session)
                state.watch(session)
            if placed_sequence is not None:
                session.placed_sequence = placed_sequence
        case Fence(worker=name):
            worker = state.workers.get(name)
            if worker is not None:
                worker.fence_in_flight = False
        case RequestCancel(session_id=session_id):
            session = state.sessions.get(session_id)
            if session is not None:
                session.cancel_in_flight = False
                state.watch(session)
        case ChangeLevel():
            state.curricula.withdrawn(intent)
        case Reject():
            state.rejected_events.pop(intent.event_id, None)
