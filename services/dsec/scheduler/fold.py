"""The scheduler's state as a fold: Events, Fold, in that order.

The state follows from the events alone, whoever published them, in the order of the stream.
Heartbeats come beside it, since they are not in the log, with the time at which they were heard.
"""

from __future__ import annotations

from uuid import UUID

from dsec.scheduler.admission import facts_digest
from dsec.scheduler.state import Absence, Death, SchedulerState, Session, Worker
from dsec_contracts import keys
from dsec_contracts.curriculum import CurriculumChanged
from dsec_contracts.envelope import Event
from dsec_contracts.service import ServiceDeclared
from dsec_contracts.session import (
    RequestFact,
    SessionCancelRequested,
    SessionEnded,
    SessionPlaced,
    SessionRejected,
    SessionReleased,
    SessionRequested,
)
from dsec_contracts.spec import PolicyPublished, SpecRegistered
from dsec_contracts.worker import HeartbeatCircumstance, WorkerFenced, WorkerHeartbeat

# -- Events ----------------------------------------------------------------------------------------

CONSUMED: tuple[type[Event], ...] = (
    SpecRegistered,
    PolicyPublished,
    ServiceDeclared,
    SessionRequested,
    SessionCancelRequested,
    SessionRejected,
    SessionPlaced,
    SessionReleased,
    SessionEnded,
    CurriculumChanged,
    WorkerFenced,
)
"""What the state is a fold of."""

# -- Fold ------------------------------------------------------------------------------------------


def evolve(state: SchedulerState, event: Event, sequence: int) -> None:
    """Take one event into the state, in the order of the stream. An event that the state already
    holds changes nothing."""
    match event:
        case SpecRegistered(fact=spec):
            state.registered(spec.spec_hash, spec.kind, event.circumstance)
        case ServiceDeclared(fact=service):
            state.declared(service.name, service.version, service.qps_budget)
        case PolicyPublished(fact=policy):
            state.policies.add(f"{policy.name}@{policy.version}")
        case SessionRequested(fact=request):
            admitted(state, request, sequence)
        case SessionCancelRequested():
            _cancel_requested(state, event)
        case SessionRejected():
            _rejected(state, event)
        case SessionPlaced():
            _placed(state, event, sequence)
        case SessionReleased():
            _released(state, event, sequence)
        case CurriculumChanged():
            state.curricula.changed(event, sequence)
        case SessionEnded(fact=ended):
            state.curricula.ended(ended.session_id, ended.steps)
            state.close(ended.session_id)
        case WorkerFenced():
            _fenced(state, event, sequence)
        case _:
            raise TypeError(f"{event.event_type()} is no event of the scheduler's state")


def admitted(state: SchedulerState, request: RequestFact, sequence: int) -> Session | None:
    """A request that is not refused: its session waits. None: it is nothing new."""
    session_id, digest = request.session_id, facts_digest(request)
    if session_id in state.closed:
        if not state.closed[session_id]:  # it ended before its request was seen
            state.closed.remember(session_id, digest)
        return None
    if session_id in state.sessions:
        return None
    cause = keys.of(session_id, keys.REQUESTED)
    services = state.asked.get(request.reward_fn_hash, ())
    session = Session(request, digest, sequence, cause=cause, services=services)
    state.add(session)
    early = state.early_cancels.pop(session_id, None)
    if early is not None:
        session.cancel = "deadline" if early == b"deadline" else "cancelled"
        state.review.add(session_id)
    return session


def _cancel_requested(state: SchedulerState, event: SessionCancelRequested) -> None:
    session_id, code = event.fact.session_id, event.circumstance.code
    session = state.sessions.get(session_id)
    if session is None:
        if session_id not in state.closed and session_id not in state.early_cancels:
            state.early_cancels.remember(session_id, code.encode())
        return
    session.cancel_in_flight = False
    if session.cancel is None:
        session.cancel = code
    if session.status == "queued":
        state.review.add(session_id)


def _rejected(state: SchedulerState, event: SessionRejected) -> None:
    fact = event.fact
    state.rejected_events.remember(fact.event_id, b"")
    if fact.code in ("malformed", "id_in_use") or fact.session_id is None:
        return  # says nothing of the session that has the id
    try:
        session = state.sessions.get(UUID(fact.session_id))
    except ValueError:
        return  # as it was written in the request: no session has such an id
    if session is not None and session.attempt == 0 and session.in_flight is None:
        state.refused.remember(session.session_id, session.facts)
        state.forget(session)


def _placed(state: SchedulerState, event: SessionPlaced, sequence: int) -> None:
    fact = event.fact
    session = state.sessions.get(fact.session_id)
    if session is None:  # another scheduler admitted it; its request is in the placement
        session = admitted(state, event.circumstance.request, sequence)
        if session is None:
            return
    session.placed_sequence = max(session.placed_sequence, sequence, 0)
    if session.in_flight == "place":
        session.in_flight = None
    if fact.attempt <= session.attempt:
        return
    session.attempt, session.moved_sequence = fact.attempt, sequence
    session.alone = fact.alone
    state.mark_placed(session)
    state.curricula.moved(fact.session_id)
    if fact.worker in state.fenced:
        # The fence came first, so nothing of this attempt gets in: it is over before it began.
        state.detach(session)
        session.lane, session.reason = fact.lane, f"worker {fact.worker} was fenced"
        session.cause = keys.of(keys.SYSTEM_SESSION, keys.fenced(fact.worker))
        state.requeue(session)
        return
    state.attach(session, fact.worker, fact.lane)
    worker = state.workers[fact.worker]
    worker.period_s = worker.period_s or event.circumstance.heartbeat_period_s


def _released(state: SchedulerState, event: SessionReleased, sequence: int) -> None:
    fact = event.fact
    session = state.sessions.get(fact.session_id)
    if session is None or session.status != "placed" or fact.attempt != session.attempt:
        return
    session.moves += 1
    session.reason = f"released by {session.worker}"
    session.cause = keys.of(fact.session_id, keys.released(fact.attempt))
    session.moved_sequence = sequence
    state.requeue(session)


def _fenced(state: SchedulerState, event: WorkerFenced, sequence: int) -> None:
    fact = event.fact
    if fact.worker in state.fenced:
        return
    state.fenced.add(fact.worker)
    worker = state.workers.pop(fact.worker, None)
    if worker is None:
        return
    for session_id in sorted(worker.sessions):
        session = state.sessions[session_id]
        if session.status == "queued":  # its placement is in flight and will come to nothing
            state.detach(session)
            continue
        session.reason = f"worker {fact.worker} was fenced ({fact.reason})"
        session.cause = keys.of(keys.SYSTEM_SESSION, keys.fenced(fact.worker))
        session.moved_sequence = sequence
        if fact.culprit is not None and fact.culprit.session_id == session_id:
            step = fact.culprit.step
            if not fact.culprit.suspect_only:
                session.deaths[step] = session.deaths.get(step, 0) + 1
            elif session.alone:
                session.killed_alone = 1 + session.killed_alone * (step == session.killed_at_step)
                session.killed_at_step = step
            session.death_reason = fact.reason
            session.restarts += 1
            session.alone = True
        elif fact.reason == "drained":
            session.moves += 1
        else:
            session.bystander_deaths += 1
        state.requeue(session)


def hear(state: SchedulerState, heartbeat: WorkerHeartbeat, at_s: float) -> None:
    """Take a heartbeat into the state. `at_s` is when it was heard, on a monotonic clock."""
    fact = heartbeat.fact
    if fact.worker in state.fenced:
        return
    worker = state.workers.get(fact.worker)
    if worker is None:
        worker = state.workers[fact.worker] = Worker(fact.worker)
    worker.heard_at_s = at_s
    worker.node, worker.isolated = fact.node, fact.isolated
    worker.lanes, worker.capacity_sessions = (
        tuple(dict.fromkeys(fact.lanes)),
        fact.capacity_sessions,
    )
    worker.period_s = heartbeat.circumstance.period_s or worker.period_s
    if fact.state == "dead" and worker.death is None:
        worker.death = Death(fact.death or "exit", fact.culprit, fact.detail)
    worker.ready = fact.state == "ready" and worker.death is None
    _named(state, worker, heartbeat.circumstance, at_s)


def _named(state: SchedulerState, worker: Worker, told: HeartbeatCircumstance, at_s: float) -> None:
    """Compare what a worker names with what the stream has placed on it."""
    if told.sessions_total is None or len(told.sessions) != len(told.attempts):
        return
    all_of_them = len(told.sessions) >= told.sessions_total
    worker.rounds += 1.0 if all_of_them else len(told.sessions) / told.sessions_total
    # An earlier attempt is not the placement that it has to answer for.
    named = {
        session_id
        for session_id, attempt in zip(told.sessions, told.attempts, strict=True)
        if session_id in worker.sessions and state.sessions[session_id].attempt == attempt
    }
    if told.reward_lag_steps is not None:
        told_of = zip(told.sessions, told.reward_lag_steps, told.steps, strict=False)
        for session_id, lag_steps, steps in told_of:
            if session_id in named:
                state.curricula.hear(session_id, lag_steps, steps, at_s)
    for session_id in named & worker.absent.keys() | _not_yet_read(state, worker, told):
        del worker.absent[session_id]
    for session_id in sorted(worker.sessions - named - worker.absent.keys()):
        if state.sessions[session_id].status == "placed":
            worker.absent[session_id] = Absence(at_s, worker.rounds)


def _not_yet_read(state: SchedulerState, worker: Worker, told: HeartbeatCircumstance) -> set[UUID]:
    """The absent sessions whose placements a worker has yet to read, as long as it gets on: a
    thousand placements take their time. Where it stands still their absence counts."""
    read = told.placements_read
    if read is None or read == worker.placements_read:
        return set()
    worker.placements_read = read
    return {one for one in worker.absent if state.sessions[one].placed_sequence > read}
