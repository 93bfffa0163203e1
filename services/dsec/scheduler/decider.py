"""The scheduler's decisions: Events, Fold, Decisions, in that order.

Pure: time comes in as an argument, what should happen goes out as intents. The state follows from
the events alone, whoever published them; what was issued and has not come back is marked in flight,
so that nothing is issued twice. Every command is safe to repeat: what is already true, or in
flight, is not asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from uuid import UUID

from dsec.scheduler.admission import Ask, AskMalformed, answer, facts_digest
from dsec.scheduler.intents import End, EndStatus, Fence, Intent, Place, Reject, RequestCancel
from dsec.scheduler.placement import Rule, Snapshot, Waiting, WorkerLoad, round_robin
from dsec.scheduler.state import Death, SchedulerState, Session, Worker
from dsec_contracts import keys
from dsec_contracts.envelope import Event
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
from dsec_contracts.worker import WorkerFenced, WorkerHeartbeat

DEATHS_AT_ONE_STEP_MAX = 2
PLACEMENTS_PER_DECISION_MAX = 1_024

# -- Events ----------------------------------------------------------------------------------------

CONSUMED: tuple[type[Event], ...] = (
    SpecRegistered,
    PolicyPublished,
    SessionRequested,
    SessionCancelRequested,
    SessionRejected,
    SessionPlaced,
    SessionReleased,
    SessionEnded,
    WorkerFenced,
)
"""What the state is a fold of. Heartbeats come beside it, since they are not in the log."""

# -- Fold ------------------------------------------------------------------------------------------


def evolve(state: SchedulerState, event: Event, sequence: int) -> None:
    """Take one event into the state, in the order of the stream. An event that the state already
    holds changes nothing."""
    match event:
        case SpecRegistered(fact=spec):
            state.specs.setdefault(spec.spec_hash, spec.kind)
        case PolicyPublished(fact=policy):
            state.policies.add(f"{policy.name}@{policy.version}")
        case SessionRequested(fact=request):
            _admitted(state, request, sequence)
        case SessionCancelRequested():
            _cancel_requested(state, event)
        case SessionRejected():
            _rejected(state, event)
        case SessionPlaced():
            _placed(state, event, sequence)
        case SessionReleased():
            _released(state, event, sequence)
        case SessionEnded(fact=ended):
            state.close(ended.session_id)
        case WorkerFenced():
            _fenced(state, event, sequence)
        case _:
            raise TypeError(f"{event.event_type()} is no event of the scheduler's state")


def _admitted(state: SchedulerState, request: RequestFact, sequence: int) -> Session | None:
    session_id, digest = request.session_id, facts_digest(request)
    if session_id in state.closed:
        if not state.closed[session_id]:  # it ended before its request was seen
            state.closed.remember(session_id, digest)
        return None
    if session_id in state.sessions:
        return None
    cause = keys.of(session_id, keys.REQUESTED)
    session = Session(request, digest, sequence, cause=cause)
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
    state.rejected_events.remember(fact.event_id)
    if fact.code in ("malformed", "id_in_use") or fact.session_id is None:
        return  # says nothing of the session that has the id
    try:
        session = state.sessions.get(UUID(fact.session_id))
    except ValueError:
        return
    if session is not None and session.attempt == 0 and session.in_flight is None:
        state.refused.remember(session.session_id, session.facts)
        state.forget(session)


def _placed(state: SchedulerState, event: SessionPlaced, sequence: int) -> None:
    fact = event.fact
    session = state.sessions.get(fact.session_id)
    if session is None:  # another scheduler admitted it; its request is in the placement
        session = _admitted(state, event.circumstance.request, sequence)
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
    if fact.worker in state.fenced:
        # The fence came first, so nothing of this attempt gets in: it is over before it began.
        state.detach(session)
        session.lane, session.reason = fact.lane, f"worker {fact.worker} was fenced"
        session.cause = keys.of(keys.SYSTEM_SESSION, keys.fenced(fact.worker))
        state.requeue(session)
        return
    state.attach(session, fact.worker, fact.lane)


def _released(state: SchedulerState, event: SessionReleased, sequence: int) -> None:
    fact = event.fact
    session = state.sessions.get(fact.session_id)
    if session is None or session.status != "placed" or fact.attempt != session.attempt:
        return
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
            session.worker = session.lane = None
            continue
        session.reason = f"worker {fact.worker} was fenced ({fact.reason})"
        session.cause = keys.of(keys.SYSTEM_SESSION, keys.fenced(fact.worker))
        session.moved_sequence = sequence
        if fact.culprit is not None and fact.culprit.session_id == session_id:
            step = fact.culprit.step
            session.deaths[step] = session.deaths.get(step, 0) + 1
            session.death_reason = fact.reason
            session.restarts += 1
            session.alone = True
        elif fact.reason != "drained":
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
    if fact.state == "dead" and worker.death is None:
        worker.death = Death(fact.death or "exit", fact.culprit, fact.detail)
    worker.ready = fact.state == "ready" and worker.death is None


# -- Decisions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that decisions keep."""

    heartbeat_period_s: float = 1.0
    heartbeat_limit_s: float = 4.0
    max_restarts: int = 16
    worker_deaths_max: int = 64


@dataclass(frozen=True, slots=True)
class Tick:
    """Command: look at what is due. `at_s` is on the clock of the heartbeats."""

    at_s: float


Command = Ask | AskMalformed | Tick


def decide(
    state: SchedulerState,
    command: Command,
    now: datetime,
    limits: Limits,
    rule: Rule = round_robin,
) -> list[Intent]:
    """What follows from a command. The caller takes a request that is not refused into the state
    (`admit`), marks each intent (`issued`) and carries it out."""
    match command:
        case Ask():
            return answer(state, command, now)
        case AskMalformed(event_id, field, message, session_id):
            if event_id in state.rejected_events:
                return []
            return [Reject(event_id, "malformed", field, message, session_id)]
        case Tick(at_s):
            return [
                *_deaths(state, at_s, limits),
                *_overdue(state, now),
                *_ends(state, limits),
                *_placements(state, rule),
            ]


def admit(state: SchedulerState, command: Ask, sequence: int) -> bool:
    """Take a request that was not refused into the state. False: it is nothing new."""
    prior = command.prior
    if command.event_id in state.rejected_events or command.request.session_id in state.refused:
        return False
    if prior is not None:
        if prior.facts is not None or prior.refused:
            return False
        if prior.cancel is not None:
            state.early_cancels.remember(command.request.session_id, prior.cancel.encode())
    return _admitted(state, command.request, sequence) is not None


def issued(state: SchedulerState, intent: Intent) -> None:
    """Mark an intent as in flight, until what it leads to is seen on the stream."""
    match intent:
        case Reject(event_id=event_id, session_id=session_id, facts=facts):
            state.rejected_events.remember(event_id)
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
        case Reject():
            state.rejected_events.pop(intent.event_id, None)


def _deaths(state: SchedulerState, at_s: float, limits: Limits) -> Iterator[Fence]:
    """Workers that are said to be dead, or have been silent for too long while we listened."""
    silence_s = max(limits.heartbeat_limit_s, 2 * limits.heartbeat_period_s)
    for worker in state.workers.values():
        if worker.fence_in_flight:
            continue
        if worker.death is not None:
            death = worker.death
        elif at_s - max(worker.heard_at_s or 0.0, state.listening_since_s) > silence_s:
            death = Death("heartbeat_lost", None, f"no heartbeat for {silence_s:g} s")
        else:
            continue
        count = len(worker.sessions)
        yield Fence(worker.name, death.reason, death.culprit, death.detail, count)


def _overdue(state: SchedulerState, now: datetime) -> Iterator[RequestCancel]:
    for session in state.overdue(now):
        cause = keys.of(session.session_id, keys.REQUESTED)
        yield RequestCancel(session.session_id, "deadline", cause)


def _ends(state: SchedulerState, limits: Limits) -> Iterator[End]:
    """Sessions without a worker that must not get another one."""
    for session_id in sorted(state.review):
        session = state.sessions[session_id]
        waits = session.status == "queued" and session.in_flight is None
        verdict = _verdict(session, limits) if waits else None
        if verdict is None:
            # Its worker sees to it, or what is in flight comes back; either brings it here again.
            state.review.discard(session_id)
            continue
        status, code, message = verdict
        cancelled = keys.of(session_id, keys.CANCEL_REQUESTED)
        cause = cancelled if status == "cancelled" else session.cause
        log_sequence = session.moved_sequence if session.attempt else None
        yield End(session_id, status, code, message, session.attempt, cause, log_sequence)


def _verdict(session: Session, limits: Limits) -> tuple[EndStatus, str, str] | None:
    if session.cancel is not None:
        return "cancelled", session.cancel, ""
    code: Literal["oom", "step_deadline", "agent_crashed"] = "agent_crashed"
    if session.death_reason == "oom" or session.death_reason == "step_deadline":
        code = session.death_reason
    for step, deaths in session.deaths.items():
        if deaths >= DEATHS_AT_ONE_STEP_MAX:
            told = f"its worker died {deaths} times at step {step}: {session.death_reason}"
            return "failed", code, told
    if session.restarts > limits.max_restarts:
        return "failed", code, f"{session.restarts} of its workers died of it"
    if session.bystander_deaths >= limits.worker_deaths_max:
        return "failed", "infrastructure", f"{session.bystander_deaths} of its workers died"
    return None


def _placements(state: SchedulerState, rule: Rule) -> Iterator[Place]:
    if state.queued == 0:
        return
    workers = tuple(
        _load(state, worker)
        for worker in state.workers.values()
        if worker.ready and not worker.fence_in_flight
    )
    free = sum(
        max(0, worker.capacity_sessions - worker.sessions)
        for worker in workers
        if not (worker.isolated or worker.held)
    )
    suspects = state.first(True, len(workers))
    waiting = suspects + state.first(False, min(free, PLACEMENTS_PER_DECISION_MAX))
    queue = tuple(
        Waiting(session.session_id, session.alone)
        for session in waiting
        if session.session_id not in state.review  # it is about to end
    )
    if not queue:
        return
    for found in rule(Snapshot(queue, workers)):
        session = state.sessions[found.session_id]
        yield Place(
            session.session_id,
            found.worker,
            found.lane,
            session.attempt + 1,
            session.previous_lane,
            session.alone,
            session.reason,
            session.cause,
            session.placed_sequence,
            session.request,
        )


def _load(state: SchedulerState, worker: Worker) -> WorkerLoad:
    lanes = tuple((lane, worker.lane_counts.get(lane, 0)) for lane in worker.lanes)
    held = len(worker.sessions) == 1 and any(state.sessions[one].alone for one in worker.sessions)
    return WorkerLoad(worker.name, lanes, worker.capacity_sessions, worker.isolated, held)
