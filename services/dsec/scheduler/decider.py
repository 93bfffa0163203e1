"""The scheduler's decisions.

Pure: time comes in as an argument, what should happen goes out as intents. The state is a fold of
the events (`fold.py`); what was issued and has not come back is marked (`in_flight.py`), so that
nothing is issued twice. Every command is safe to repeat: what is already true, or in flight, is not
asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from dsec.scheduler.admission import Ask, AskMalformed, answer
from dsec.scheduler.fold import admitted
from dsec.scheduler.intents import End, EndStatus, Fence, Intent, Place, Reject, RequestCancel
from dsec.scheduler.placement import Rule, Snapshot, Waiting, WorkerLoad, round_robin
from dsec.scheduler.state import Death, SchedulerState, Session, Worker
from dsec_contracts import keys

DEATHS_AT_ONE_STEP_MAX = 2
KILLS_ALONE_AT_ONE_STEP_MAX = 4
"""A kill from outside hits a session's code at some step or other. Where it is the same one so
often in a row, each time on a worker that nobody else was on, they come from what it starts."""
ABSENT_ROUNDS_MIN = 3.0
"""A worker with more sessions than a beat has room for names each once a round, and what leaves it
meanwhile can push one out of a round."""
PLACEMENTS_PER_DECISION_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that decisions keep."""

    heartbeat_period_s: float = 1.0
    heartbeat_limit_s: float = 4.0
    max_restarts: int = 16
    worker_deaths_max: int = 64
    session_absent_limit_s: float = 60.0
    moves_max: int = 1_000
    call_every_s: float = 2.0


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
                *_placements(state, limits, rule),
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
    return admitted(state, command.request, sequence) is not None


def _deaths(state: SchedulerState, at_s: float, limits: Limits) -> Iterator[Fence]:
    """Workers that are said to be dead, or have been silent for too long while we listened."""
    heard_s = min(at_s, state.heard_until_s)  # what we have not heard yet is not their silence
    for worker in state.workers.values():
        if worker.fence_in_flight:
            continue
        period_s = max(limits.heartbeat_period_s, worker.period_s or 0.0)
        silence_s = max(limits.heartbeat_limit_s, 2 * period_s)
        if worker.death is not None:
            death = worker.death
        elif heard_s - max(worker.heard_at_s or 0.0, state.listening_since_s) > silence_s:
            death = Death("heartbeat_lost", None, f"no heartbeat for {silence_s:g} s")
        elif (lost := _lost(state, worker, limits)) is not None:
            death = lost
        else:
            continue
        count = len(worker.sessions)
        yield Fence(worker.name, death.reason, death.culprit, death.detail, count)


def _lost(state: SchedulerState, worker: Worker, limits: Limits) -> Death | None:
    """Whether a worker has lost a session: one that was placed on it and that it does not name.

    It may yet have it, so the session cannot simply be placed elsewhere: two would run it. A single
    session moves after its worker's release, and whoever lost it will not release it. So the worker
    goes as a whole, like a dead one, and nothing of what it may still do gets in.

    That it does not name a session can also be since that has ended: its end was published before,
    so the stream has to be followed to well after the beat, not the clock alone.
    """
    if not worker.absent:
        return None
    session_id, absence = next(iter(worker.absent.items()))  # of all, the longest absent
    if state.followed_until_s - absence.since_s <= limits.session_absent_limit_s:
        return None
    if worker.rounds - absence.since_rounds < ABSENT_ROUNDS_MIN:
        return None
    told = f"session {session_id} is in none of its heartbeats"
    detail = f"{told} for {limits.session_absent_limit_s:g} s: its placement was lost"
    return Death("heartbeat_lost", None, detail)


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
    if session.killed_alone >= KILLS_ALONE_AT_ONE_STEP_MAX:
        told = f"{session.killed_alone} workers that it had to itself were killed at step "
        return "failed", "agent_crashed", f"{told}{session.killed_at_step}"
    if session.restarts > limits.max_restarts:
        return "failed", code, f"{session.restarts} of its workers died of it"
    if session.bystander_deaths >= limits.worker_deaths_max:
        return "failed", "infrastructure", f"{session.bystander_deaths} of its workers died"
    if session.moves >= limits.moves_max:
        told = f"workers gave it back {session.moves} times, or went in good order"
        return "failed", "infrastructure", told
    return None


def _room(state: SchedulerState, limits: Limits) -> dict[str, int]:
    """How many more sessions may ask each declared service: all that are placed could make a call
    every `call_every_s` within its budget. One always may, or it would wait for ever."""
    return {
        name: max(1, int(qps_budget * limits.call_every_s)) - state.callers[name]
        for name, (_, qps_budget) in state.budgets.items()
    }


def _placements(state: SchedulerState, limits: Limits, rule: Rule) -> Iterator[Place]:
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
    room = _room(state, limits)
    waiting = suspects + state.first(False, min(free, PLACEMENTS_PER_DECISION_MAX), room)
    queue = tuple(
        Waiting(session.session_id, session.alone, bool(session.services)) for session in waiting
    )
    if not queue:
        return
    for found in rule(Snapshot(queue, workers)):
        session = state.sessions[found.session_id]
        period_s = state.workers[found.worker].period_s
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
            None if period_s == limits.heartbeat_period_s else period_s,
        )


def _load(state: SchedulerState, worker: Worker) -> WorkerLoad:
    lanes = tuple((lane, worker.lane_counts.get(lane, 0)) for lane in worker.lanes)
    held = len(worker.sessions) == 1 and any(state.sessions[one].alone for one in worker.sessions)
    callers = tuple((lane, n) for lane, n in sorted(worker.lane_callers.items()) if n)
    capacity = worker.capacity_sessions
    return WorkerLoad(worker.name, lanes, capacity, worker.isolated, held, callers)
