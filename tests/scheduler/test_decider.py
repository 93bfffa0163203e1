"""The decider: admission, the queue, deaths, ends; and that every command is safe to repeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import process_time
from typing import Any
from uuid import UUID

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dsec.scheduler.admission import Ask, AskMalformed, Prior, facts_digest
from dsec.scheduler.decider import KILLS_ALONE_AT_ONE_STEP_MAX, Limits, Tick, admit, decide
from dsec.scheduler.fold import evolve, hear
from dsec.scheduler.in_flight import issued, withdrawn
from dsec.scheduler.intents import End, Fence, Intent, Place, Reject, RequestCancel
from dsec.scheduler.state import SchedulerState
from dsec_contracts import (
    PolicyPublished,
    SessionCancelRequested,
    SessionEnded,
    SessionPlaced,
    SessionRejected,
    SessionReleased,
    SpecRegistered,
    WorkerFenced,
    WorkerHeartbeat,
)
from dsec_contracts.service import ServiceDeclared, ServiceFact
from dsec_contracts.session import (
    CancelCircumstance,
    CancelFact,
    EndedFact,
    PlacedCircumstance,
    PlacedFact,
    RejectFact,
    ReleasedFact,
    RequestFact,
)
from dsec_contracts.spec import PolicyFact, SpecCircumstance, SpecFact
from dsec_contracts.worker import Culprit, FencedFact, HeartbeatCircumstance, HeartbeatFact

NOW = datetime(2026, 6, 1, tzinfo=UTC)
LIMITS = Limits(max_restarts=3, worker_deaths_max=5, moves_max=4)
AGENT, ENV, REWARD = "a" * 64, "b" * 64, "c" * 64


def session_id(n: int, at: datetime = NOW) -> UUID:
    return UUID(int=(int(at.timestamp() * 1000) << 80) | (7 << 76) | (2 << 62) | n)


def request(n: int, **changes: Any) -> RequestFact:
    value = {
        "session_id": session_id(n),
        "agent_spec": AGENT,
        "env_spec": ENV,
        "reward_fn_hash": REWARD,
        "seed": 1,
        "max_steps": 5,
        "creation_timestamp": NOW,
        **changes,
    }
    return RequestFact.model_validate(value)


@dataclass
class Model:
    """A scheduler without I/O: intents become the events they lead to, at once or when told."""

    state: SchedulerState = field(default_factory=SchedulerState)
    sequence: int = 0
    at_s: float = 0.0
    now: datetime = NOW

    def __post_init__(self) -> None:
        for spec_hash, kind in ((AGENT, "agent"), (ENV, "env"), (REWARD, "reward")):
            fact = SpecFact.model_construct(spec_hash=spec_hash, kind=kind, content=b"")
            told = SpecCircumstance()
            self.see(SpecRegistered.model_construct(fact=fact, circumstance=told))

    def asks(self, spec_hash: str, *services: str) -> None:
        """A reward spec whose function asks services."""
        fact = SpecFact.model_construct(spec_hash=spec_hash, kind="reward", content=b"")
        told = SpecCircumstance(services=list(services))
        self.see(SpecRegistered.model_construct(fact=fact, circumstance=told))

    def declares(self, name: str, qps_budget: float, version: int = 1) -> None:
        """A service is declared."""
        terms = {"base_url": "http://localhost", "qps_budget": qps_budget}
        fact = ServiceFact.model_validate({"name": name, "version": version, **terms})
        self.see(ServiceDeclared(fact=fact))

    def see(self, event: Any) -> int:
        self.sequence += 1
        evolve(self.state, event, self.sequence)
        return self.sequence

    def ask(
        self, fact: RequestFact, event_id: str = "e", prior: Prior | None = None
    ) -> list[Intent]:
        command = Ask(event_id, fact, prior)
        intents = decide(self.state, command, self.now, LIMITS)
        self.sequence += 1
        refused = any(isinstance(intent, Reject) for intent in intents)
        if not refused and not admit(self.state, command, self.sequence):
            return []
        for intent in intents:
            issued(self.state, intent)
        return intents

    def tick(self, *, issue: bool = True) -> list[Intent]:
        intents = decide(self.state, Tick(self.at_s), self.now, LIMITS)
        for intent in intents if issue else []:
            issued(self.state, intent)
        return intents

    def beat(self, worker: str, *, lanes: int = 2, **changes: Any) -> None:
        value = {
            "worker": worker,
            "node": "n",
            "state": "ready",
            "lanes": [f"{worker}-{n}" for n in range(lanes)],
            "capacity_sessions": 10,
            **changes,
        }
        hear(self.state, WorkerHeartbeat(fact=HeartbeatFact.model_validate(value)), self.at_s)

    def names(
        self,
        worker: str,
        *numbers: int,
        total: int | None = None,
        attempt: int = 1,
        read: int | None = None,
    ) -> None:
        """A worker beats and names what it has, and up to where it has read placements."""
        fact = HeartbeatFact(
            worker=worker, node="n", state="ready", lanes=[f"{worker}-0"], capacity_sessions=10
        )
        told = HeartbeatCircumstance(
            sessions=[session_id(n) for n in numbers],
            attempts=[attempt] * len(numbers),
            sessions_total=len(numbers) if total is None else total,
            placements_read=read,
        )
        hear(self.state, WorkerHeartbeat(fact=fact, circumstance=told), self.at_s)

    def pass_s(self, seconds: float) -> None:
        """Time passes, and the stream is followed."""
        self.at_s += seconds
        self.state.followed_until_s = self.at_s

    def happens(self, intents: list[Intent]) -> None:
        """The stream shows what was issued."""
        for intent in intents:
            self.see(event_of(intent))

    def place(self, n: int = 1) -> Place:
        """Have a session placed."""
        self.ask(request(n), f"e{n}")
        found = self.tick()
        self.happens(found)
        return next(p for p in found if isinstance(p, Place) and p.session_id == session_id(n))

    def fenced(
        self,
        worker: str,
        reason: str = "signal",
        culprit: tuple[int, int] | None = None,
        *,
        suspect_only: bool | None = None,
    ) -> None:
        who = (
            None
            if culprit is None
            else Culprit(
                session_id=session_id(culprit[0]), step=culprit[1], suspect_only=suspect_only
            )
        )
        fact = FencedFact.model_validate({"worker": worker, "reason": reason, "culprit": who})
        self.see(WorkerFenced(fact=fact))


def event_of(intent: Intent) -> Any:
    match intent:
        case Place():
            fact = PlacedFact(
                session_id=intent.session_id,
                attempt=intent.attempt,
                worker=intent.worker,
                lane=intent.lane,
                previous_lane=intent.previous_lane,
                alone=intent.alone,
            )
            told = PlacedCircumstance(
                request=intent.request, heartbeat_period_s=intent.heartbeat_period_s
            )
            return SessionPlaced(fact=fact, circumstance=told)
        case Fence():
            return WorkerFenced(
                fact=FencedFact(worker=intent.worker, reason=intent.reason, culprit=intent.culprit)
            )
        case End():
            return ended(intent.session_id, intent.status, intent.code)
        case RequestCancel():
            return cancel(intent.session_id, "deadline")
        case Reject():
            value = {
                "event_id": intent.event_id,
                "code": intent.code,
                "session_id": intent.session_id,
            }
            return SessionRejected(fact=RejectFact.model_validate(value))


def ended(session: UUID, status: Any = "completed", code: str = "max_steps") -> SessionEnded:
    return SessionEnded(
        fact=EndedFact(
            session_id=session, status=status, code=code, steps=0, episodes=0, inputs=b"", chain=b""
        )
    )


def cancel(session: UUID, code: Any = "cancelled") -> SessionCancelRequested:
    return SessionCancelRequested(
        fact=CancelFact(session_id=session), circumstance=CancelCircumstance(code=code)
    )


# -- admission -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "name"),
    [
        ({"agent_spec": "d" * 64}, "unregistered_spec", "agent_spec"),
        ({"env_spec": "d" * 64}, "unregistered_spec", "env_spec"),
        ({"reward_fn_hash": "d" * 64}, "unregistered_spec", "reward_fn_hash"),
        ({"env_spec": AGENT}, "wrong_spec_kind", "env_spec"),
        ({"policy": "p@1"}, "unregistered_policy", "policy"),
        ({"fork_parent": "x"}, "not_implemented", "fork_parent"),
        ({"curriculum_level": -1}, "malformed", "curriculum_level"),
        ({"curriculum_level": 10**6 + 1}, "malformed", "curriculum_level"),
        ({"session_id": session_id(1, NOW + timedelta(days=2))}, "id_out_of_window", "session_id"),
    ],
)
def test_a_refusal_names_the_field(changes: dict[str, Any], code: str, name: str) -> None:
    model = Model()
    (found,) = model.ask(request(1, **changes))
    assert isinstance(found, Reject)
    assert (found.code, found.field, found.event_id) == (code, name, "e")
    assert model.state.sessions == {}
    assert model.ask(request(1, **changes)) == [], "one event is rejected once"


def test_a_published_policy_is_known() -> None:
    model = Model()
    fact = PolicyFact(name="p", version="1", content_hash=AGENT, blob="x", size_bytes=1)
    model.see(PolicyPublished(fact=fact))
    assert model.ask(request(1, policy="p@1")) == []
    assert session_id(1) in model.state.sessions


def test_an_id_is_used_by_its_first_facts() -> None:
    model = Model()
    assert model.ask(request(1), "e1") == []
    assert model.ask(request(1), "e2") == [], "the same facts again: nothing happens"
    (found,) = model.ask(request(1, seed=2), "e3")
    assert isinstance(found, Reject)
    assert (found.code, found.event_id) == ("id_in_use", "e3")
    model.see(ended(session_id(1)))
    assert model.ask(request(1), "e4") == []
    (found,) = model.ask(request(1, seed=2), "e5")
    assert isinstance(found, Reject)
    assert found.code == "id_in_use"
    assert model.state.sessions == {}


def test_an_id_that_only_the_log_knows_is_used() -> None:
    model = Model()
    known = facts_digest(request(1))
    assert model.ask(request(1), "e1", Prior(known, False)) == []
    (found,) = model.ask(request(1, seed=2), "e2", Prior(known, False))
    assert isinstance(found, Reject)
    assert found.code == "id_in_use"
    (found,) = model.ask(request(1), "e3", Prior(known, True))
    assert isinstance(found, Reject)
    assert found.code == "id_in_use", "its request was rejected, so it never became a session"
    assert model.ask(request(1), "e4", Prior(None, True)) == [], "this very request was answered"
    assert model.state.sessions == {}


def test_a_rejected_request_uses_its_id_up() -> None:
    model = Model()
    model.ask(request(1, agent_spec="d" * 64), "e1")
    (found,) = model.ask(request(1), "e2")
    assert isinstance(found, Reject)
    assert found.code == "id_in_use"


def test_a_malformed_request_uses_nothing_up() -> None:
    model = Model()
    command = AskMalformed("e1", "fact.seed", "no", str(session_id(1)))
    (found,) = decide(model.state, command, NOW, LIMITS)
    issued(model.state, found)
    assert decide(model.state, command, NOW, LIMITS) == []
    model.happens([found])
    assert model.ask(request(1), "e2") == []
    assert session_id(1) in model.state.sessions


def test_a_request_that_comes_too_late_ends() -> None:
    model = Model()
    (found,) = model.ask(request(1, deadline=NOW))
    assert isinstance(found, End)
    assert (found.status, found.code, found.log_sequence) == ("cancelled", "deadline", None)
    model.beat("w")
    assert model.tick() == []


# -- the queue -------------------------------------------------------------------------------------


def test_priority_then_position() -> None:
    model = Model()
    for n, priority in ((1, 0), (2, 5), (3, 5), (4, -1)):
        model.ask(request(n, priority=priority), f"e{n}")
    model.beat("w", capacity_sessions=3)
    found = [p.session_id for p in model.tick() if isinstance(p, Place)]
    assert found == [session_id(2), session_id(3), session_id(1)]


def test_what_is_in_flight_is_not_issued_again() -> None:
    model = Model()
    model.ask(request(1))
    model.beat("w")
    (place,) = model.tick()
    assert isinstance(place, Place)
    assert (place.attempt, place.expected_sequence, place.previous_lane) == (1, 0, None)
    assert model.tick() == []
    model.happens([place])
    assert model.tick() == []


def test_a_refused_placement_is_issued_on_what_the_stream_has() -> None:
    model = Model()
    model.ask(request(1))
    model.beat("w")
    (place,) = model.tick()
    withdrawn(model.state, place, 17)
    (again,) = model.tick()
    assert isinstance(again, Place)
    assert again.expected_sequence == 17


def test_somebody_elses_placement_counts() -> None:
    model = Model()
    model.ask(request(1))
    model.beat("w")
    (mine,) = model.tick()
    assert isinstance(mine, Place)
    fact = PlacedFact(session_id=session_id(1), attempt=1, worker="other", lane="other-0")
    model.see(SessionPlaced(fact=fact, circumstance=PlacedCircumstance(request=request(1))))
    assert model.state.sessions[session_id(1)].worker == "other"
    assert model.state.workers["w"].sessions == set()
    withdrawn(model.state, mine, None)
    assert model.tick() == []


def test_an_older_placement_changes_nothing() -> None:
    model = Model()
    model.beat("w")
    first = model.place()
    model.see(SessionReleased(fact=ReleasedFact(session_id=session_id(1), attempt=1)))
    model.see(event_of(first))
    session = model.state.sessions[session_id(1)]
    assert (session.status, session.worker) == ("queued", None)
    assert session.placed_sequence == model.sequence, "but the next one must build on it"


def test_a_draining_worker_gets_nothing() -> None:
    model = Model()
    model.ask(request(1))
    model.beat("w", state="draining")
    assert model.tick() == []


def test_a_released_session_is_placed_again() -> None:
    model = Model()
    model.beat("w")
    first = model.place()
    sequence = model.state.sessions[session_id(1)].placed_sequence
    model.beat("w", state="draining")
    model.see(SessionReleased(fact=ReleasedFact(session_id=session_id(1), attempt=1)))
    model.beat("v")
    (again,) = model.tick()
    assert isinstance(again, Place)
    assert (again.attempt, again.previous_lane, again.worker) == (2, first.lane, "v")
    assert again.expected_sequence == sequence
    stale = SessionReleased(fact=ReleasedFact(session_id=session_id(1), attempt=1))
    model.happens([again])
    model.see(stale)
    assert model.state.sessions[session_id(1)].status == "placed"


# -- cancel and deadline ---------------------------------------------------------------------------


def test_cancel_ends_a_waiting_session_and_leaves_a_placed_one_to_its_worker() -> None:
    model = Model()
    model.ask(request(1))
    model.see(cancel(session_id(1)))
    (end,) = model.tick()
    assert isinstance(end, End)
    assert (end.status, end.code, end.log_sequence) == ("cancelled", "cancelled", None)
    model.happens([end])
    model.beat("w")
    model.place(2)
    model.see(cancel(session_id(2)))
    assert model.tick() == []
    model.fenced("w")
    (end,) = model.tick()
    assert isinstance(end, End)
    assert (end.code, end.log_sequence, end.attempt) == ("cancelled", model.sequence, 1)


def test_a_cancel_that_comes_first_counts() -> None:
    model = Model()
    model.beat("w")
    model.see(cancel(session_id(1), "deadline"))
    model.ask(request(1))
    (end,) = model.tick()
    assert isinstance(end, End)
    assert end.code == "deadline"


def test_a_deadline_is_asked_for_once() -> None:
    model = Model()
    model.beat("w")
    model.ask(request(1, deadline=NOW + timedelta(seconds=5)))
    model.happens(model.tick())
    assert model.tick() == []
    model.now += timedelta(seconds=6)
    (found,) = model.tick()
    assert isinstance(found, RequestCancel)
    assert model.tick() == []
    model.happens([found])
    assert model.tick() == []


def test_a_deadline_ends_a_waiting_session() -> None:
    model = Model()
    model.ask(request(1, deadline=NOW + timedelta(seconds=5)))
    model.now += timedelta(seconds=6)
    model.happens(model.tick())
    (end,) = model.tick()
    assert isinstance(end, End)
    assert (end.status, end.code) == ("cancelled", "deadline")


# -- deaths ----------------------------------------------------------------------------------------


def test_silence_is_death_only_while_we_listened() -> None:
    model = Model()
    model.beat("w")
    model.place()
    model.at_s = 4.0
    assert model.tick() == []
    model.at_s = 4.1
    (fence,) = model.tick(issue=False)
    assert isinstance(fence, Fence)
    assert (fence.worker, fence.reason, fence.sessions) == ("w", "heartbeat_lost", 1)
    model.state.listening_since_s = 4.0
    assert model.tick() == []
    model.at_s = 8.1
    assert len(model.tick()) == 1
    assert model.tick() == [], "a fence in flight is not issued again"


def test_what_was_not_heard_yet_is_nobodys_silence() -> None:
    """Heartbeats may lie in the buffers of the server, or in our own."""
    model = Model()
    model.beat("w")
    model.place()
    model.at_s = 60.0
    model.state.heard_until_s = 4.0
    assert model.tick() == []
    model.state.heard_until_s = 4.1
    assert [type(intent) for intent in model.tick()] == [Fence]


def test_the_fence_comes_before_the_next_placement() -> None:
    model = Model()
    model.beat("w")
    first = model.place()
    model.at_s = 5.0
    model.beat("v")
    found = model.tick()
    assert [type(one) for one in found] == [Fence]
    model.happens(found)
    (again,) = model.tick()
    assert isinstance(again, Place)
    assert (again.worker, again.attempt, again.previous_lane) == ("v", 2, first.lane)


def test_a_supervisors_word_is_believed_at_once() -> None:
    model = Model()
    model.beat("w")
    model.place()
    culprit = {"session_id": session_id(1), "step": 3}
    model.beat("w", state="dead", death="oom", culprit=culprit)
    (fence,) = model.tick()
    assert isinstance(fence, Fence)
    assert (fence.reason, fence.culprit and fence.culprit.step) == ("oom", 3)
    model.happens([fence])
    model.beat("w")
    assert "w" not in model.state.workers, "a fenced worker does not come back"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("exit", "agent_crashed"),
        ("signal", "agent_crashed"),
        ("oom", "oom"),
        ("step_deadline", "step_deadline"),
    ],
)
def test_the_culprit_is_placed_alone_and_ends_at_its_second_death(reason: str, code: str) -> None:
    model = Model()
    model.beat("w1")
    model.place(1)
    model.place(2)
    model.fenced("w1", reason, (1, 3))
    model.beat("w2")
    model.beat("iso", isolated=True, capacity_sessions=1)
    found = {p.session_id: p for p in model.tick() if isinstance(p, Place)}
    assert (found[session_id(1)].worker, found[session_id(1)].alone) == ("iso", True)
    assert (found[session_id(2)].worker, found[session_id(2)].alone) == ("w2", False)
    model.happens(list(found.values()))
    model.fenced("iso", reason, (1, 3))
    (end,) = model.tick()
    assert isinstance(end, End)
    assert (end.session_id, end.status, end.code) == (session_id(1), "failed", code)
    assert end.log_sequence == model.sequence


def killed(model: Model, steps: list[int], limits: Limits = LIMITS) -> list[Intent]:
    """A session's workers are killed at these steps of its, the first among others: what is due
    after that."""
    model.ask(request(1))
    for n, step in enumerate(steps):
        model.beat(f"iso{n}", isolated=n > 0)
        (found,) = decide(model.state, Tick(model.at_s), model.now, limits)
        assert isinstance(found, Place), (n, found)
        issued(model.state, found)
        assert found.alone == (n > 0)
        model.happens([found])
        model.fenced(f"iso{n}", "signal", (1, step), suspect_only=True)
    model.beat("next", isolated=True)
    return decide(model.state, Tick(model.at_s), model.now, limits)


def test_kills_from_outside_are_no_crash_and_bounded_all_the_same() -> None:
    (end,) = killed(Model(), [3, 3, 3, 4], Limits(max_restarts=3))
    assert isinstance(end, End)
    assert (end.code, "4 of its workers died" in end.message) == ("agent_crashed", True)


def test_kills_on_a_shared_worker_prove_nothing() -> None:
    """Whoever kills workers can hit one at the same step twice: among others, many take it."""
    (place,) = killed(Model(), [3] * KILLS_ALONE_AT_ONE_STEP_MAX, Limits())
    assert isinstance(place, Place)


def test_whose_workers_are_killed_at_one_step_while_alone_kills_them_itself() -> None:
    model = Model()
    (end,) = killed(model, [3] * (1 + KILLS_ALONE_AT_ONE_STEP_MAX), Limits())
    assert isinstance(end, End)
    assert (end.status, end.code) == ("failed", "agent_crashed")
    assert end.message == "4 workers that it had to itself were killed at step 3"
    assert end.log_sequence == model.sequence


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=16, max_size=16))
def test_kills_that_do_not_stay_at_one_step_end_nobody_before_max_restarts(
    steps: list[int],
) -> None:
    """Property (c): whoever kills from outside hits a session wherever it stands."""
    most = KILLS_ALONE_AT_ONE_STEP_MAX
    assume(all(len(set(steps[n : n + most])) > 1 for n in range(1, 17 - most)))
    (place,) = killed(Model(), steps, Limits(max_restarts=16))
    assert isinstance(place, Place)


def test_deaths_at_different_steps_are_bounded_by_max_restarts() -> None:
    model = Model()
    model.ask(request(1))
    for n in range(LIMITS.max_restarts + 1):
        model.beat(f"iso{n}", isolated=n > 0)
        found = model.tick()
        assert [type(one) for one in found] == [Place]
        model.happens(found)
        model.fenced(f"iso{n}", "exit", (1, n))
    (end,) = model.tick()
    assert isinstance(end, End)
    assert end.code == "agent_crashed"


def test_deaths_of_others_count_against_nobody_until_there_are_too_many() -> None:
    model = Model()
    model.ask(request(1))
    for n in range(LIMITS.worker_deaths_max):
        model.beat(f"w{n}")
        found = model.tick()
        assert [type(one) for one in found] == [Place]
        assert not found[0].alone  # type: ignore[union-attr]
        model.happens(found)
        model.fenced(f"w{n}", "heartbeat_lost")
    (end,) = model.tick()
    assert isinstance(end, End)
    assert (end.status, end.code) == ("failed", "infrastructure")


@pytest.mark.parametrize("how", ["drained", "released", "both"])
def test_moves_in_good_order_are_bounded_too(how: str) -> None:
    model = Model()
    model.ask(request(1))
    for n in range(LIMITS.moves_max):
        model.beat(f"w{n}")
        (place,) = model.tick()
        assert isinstance(place, Place)
        model.happens([place])
        if how == "released" or (how == "both" and n % 2):
            fact = ReleasedFact(session_id=session_id(1), attempt=place.attempt)
            model.see(SessionReleased(fact=fact))
        model.fenced(f"w{n}", "drained")
    (end,) = model.tick()
    assert isinstance(end, End)
    assert (end.status, end.code) == ("failed", "infrastructure")
    assert "gave it back 4 times" in end.message


def test_a_placement_that_lands_behind_its_workers_fence_is_void() -> None:
    model = Model()
    model.ask(request(1))
    model.beat("w")
    (place,) = model.tick()
    assert isinstance(place, Place)
    model.fenced("w")
    assert model.tick() == [], "its placement is still in flight"
    sequence = model.see(event_of(place))
    model.beat("v")
    (again,) = model.tick()
    assert isinstance(again, Place)
    assert (again.attempt, again.previous_lane) == (2, place.lane)
    assert again.expected_sequence == sequence


def test_whoever_is_about_to_end_takes_nobodys_place() -> None:
    model = Model()
    for n in (1, 2):
        model.ask(request(n, priority=n), f"e{n}")
    model.see(cancel(session_id(2)))
    model.beat("w", capacity_sessions=1)
    end, place = model.tick()
    assert isinstance(end, End)
    assert isinstance(place, Place)
    assert (end.session_id, place.session_id) == (session_id(2), session_id(1))
    assert model.tick() == []


def test_a_suspect_shares_no_worker() -> None:
    model = Model()
    model.beat("w1")
    model.place(1)
    model.fenced("w1", "exit", (1, 0))
    model.beat("w2")
    (place,) = model.tick()
    model.happens([place])
    model.ask(request(2), "e2")
    assert model.tick() == [], "no isolated worker: it took an empty one, which is held for it"


# -- placements that were lost ---------------------------------------------------------------------


def with_two_placed() -> Model:
    model = Model()
    model.names("w1")
    model.place(1)
    model.place(2)
    return model


def beats(model: Model, seconds: int, *numbers: int, **options: Any) -> list[Intent]:
    found: list[Intent] = []
    for _ in range(seconds):
        model.names("w1", *numbers, **options)
        found += model.tick()
        model.pass_s(1)
    return found


def test_a_worker_that_lost_a_session_is_fenced_and_both_move() -> None:
    model = with_two_placed()
    assert beats(model, 30, 1, 2) == []
    assert beats(model, 60, 1) == []
    (fence,) = beats(model, 5, 1)
    assert isinstance(fence, Fence)
    assert (fence.worker, fence.reason, fence.culprit) == ("w1", "heartbeat_lost", None)
    assert str(session_id(2)) in fence.detail
    model.happens([fence])
    model.names("w2")
    places = model.tick()
    assert [(p.worker, p.attempt) for p in places if isinstance(p, Place)] == [("w2", 2)] * 2


def test_a_worker_that_has_yet_to_read_its_placements_has_lost_none() -> None:
    """It may have thousands of them to read, among those of all other workers."""
    model = with_two_placed()
    first, second = (model.state.sessions[session_id(n)].placed_sequence for n in (1, 2))
    for read in range(first - 300, second):
        assert beats(model, 1, *[1] * (read >= first), read=read) == []
    assert beats(model, 1, 1, 2, read=second) == []


def test_a_worker_that_reads_no_further_has_lost_what_lies_behind() -> None:
    model = with_two_placed()
    read = model.state.sessions[session_id(2)].placed_sequence - 1
    assert beats(model, 60, 1, read=read) == []
    assert [type(intent) for intent in beats(model, 5, 1, read=read)] == [Fence] * 1


def test_a_placement_that_was_read_and_is_not_named_is_lost_however_far_reading_gets() -> None:
    model = with_two_placed()
    read = model.state.sessions[session_id(2)].placed_sequence
    for second in range(60):
        assert beats(model, 1, 1, read=read + second) == []
    found = [intent for n in range(5) for intent in beats(model, 1, 1, read=read + 60 + n)]
    assert [type(intent) for intent in found] == [Fence]


def test_a_session_that_is_named_again_was_not_lost() -> None:
    model = with_two_placed()
    for _ in range(10):
        assert beats(model, 50, 1) == []
        assert beats(model, 1, 1, 2) == []


def test_an_earlier_attempt_is_not_the_one_that_was_placed() -> None:
    model = with_two_placed()
    assert beats(model, 61, 1, 2, attempt=0) == []
    assert beats(model, 2, 1, 2, attempt=0) != []


def test_a_beat_that_does_not_say_what_the_worker_has_says_nothing() -> None:
    """A supervisor beats for a worker whose user code runs."""
    model = with_two_placed()
    model.names("w1")
    for _ in range(200):
        model.beat("w1")
        model.pass_s(1)
        assert model.tick() == []


def test_one_silent_beat_is_not_enough_however_old_it_is() -> None:
    model = with_two_placed()
    model.names("w1")
    model.pass_s(100)
    for _ in range(3):
        model.names("w1")
        found = model.tick()
    assert [type(intent) for intent in found] == [Fence]


def test_nobody_is_blamed_while_the_stream_is_not_followed() -> None:
    """A session that is not named may have ended: the end is in the stream."""
    model = with_two_placed()
    model.names("w1", 1, 2)
    for _ in range(300):
        model.at_s += 1
        model.names("w1", 1)
        assert model.tick() == []
    model.see(ended(session_id(2)))
    model.pass_s(1)
    assert beats(model, 100, 1) == []


def test_parts_are_waited_for_until_they_have_gone_round() -> None:
    """A worker with more than a beat has room for: each is named in one beat of a hundred."""
    model = with_two_placed()
    for n in range(3, 7):
        model.place(n)
    for second in range(1_000):
        named = [1 + second // 100 % 6] if second % 100 == 0 else []
        model.names("w1", *named, total=600)
        assert model.tick() == []
        model.pass_s(1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["ask", "end", "open", "beat"]), st.integers(0, 5))),
    st.integers(1, 3),
)
def test_a_worker_that_names_what_it_has_is_never_blamed_and_one_that_forgot_is(
    script: list[tuple[str, int]], room: int
) -> None:
    model = Model()
    model.names("w1")
    mine: list[int] = []
    delivered: list[int] = []
    turn = 0

    def second() -> list[Intent]:
        nonlocal turn
        has = mine + delivered
        turn = (turn + room) % max(len(has), 1)
        part = (has[turn:] + has[:turn])[:room]
        model.names("w1", *part, total=len(has))
        found = model.tick()
        model.happens(found)
        delivered.extend(n for n in range(6) for i in found if is_place(i, n))
        model.pass_s(1)
        return [intent for intent in found if isinstance(intent, Fence)]

    for action, n in script:
        if action == "ask" and session_id(n) not in model.state.sessions:
            model.ask(request(n), f"e{n}")
        elif action == "end" and n in mine:
            mine.remove(n)
            model.see(ended(session_id(n)))
        elif action == "open" and n in delivered:
            delivered.remove(n)
            mine.append(n)
        for _ in range(30):
            assert second() == []
    if mine:
        forgotten = mine.pop()
        fences = [fence for _ in range(80) for fence in second()]
        assert [fence.worker for fence in fences] == ["w1"], f"{forgotten} was forgotten"


def is_place(intent: Intent, n: int) -> bool:
    return isinstance(intent, Place) and intent.session_id == session_id(n)


# -- every command is safe to repeat ---------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "beat", "dead", "silent", "cancel", "end", "release", "late", "isolated"]
        ),
        st.integers(0, 5),
        st.integers(0, 2),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps, st.booleans())
def test_repeating_any_command_adds_no_event(
    script: list[tuple[str, int, int]], delayed: bool
) -> None:
    model = Model()
    outstanding: list[Intent] = []
    for action, n, other in script:
        outstanding += _perform(model, action, n, other)
        outstanding += model.tick()
        assert model.tick() == []
        _check(model)
        if not delayed or n % 2:
            for intent in outstanding:
                event = event_of(intent)
                model.see(event)
                before = _facts(model)
                model.see(event)
                assert _facts(model) == before, "an event that is seen twice changes nothing"
            outstanding = []


def _perform(model: Model, action: str, n: int, other: int) -> list[Intent]:
    session = model.state.sessions.get(session_id(n))
    match action:
        case "ask":
            fact = request(n, priority=other, deadline=NOW + timedelta(seconds=10 * (n + 1)))
            found = model.ask(fact, f"e{n}-{other}")
            assert model.ask(fact, f"e{n}-{other}") == []
            return found
        case "beat":
            model.beat(f"w{n}", capacity_sessions=2)
        case "isolated":
            model.beat(f"i{n}", capacity_sessions=1, isolated=True)
        case "dead":
            culprit = {"session_id": session_id(other), "step": other}
            model.beat(f"w{n}", state="dead", death="exit", culprit=culprit if other else None)
        case "silent":
            model.at_s += n
        case "late":
            model.now += timedelta(seconds=n)
        case "cancel" if session is not None:
            model.see(cancel(session_id(n)))
        case "end" if session is not None and session.status == "placed":
            model.see(ended(session_id(n)))
        case "release" if session is not None:
            fact = ReleasedFact(session_id=session_id(n), attempt=max(session.attempt, 1))
            model.see(SessionReleased(fact=fact))
    return []


def _facts(model: Model) -> Any:
    state = model.state
    return (
        {
            one.session_id: (
                one.status,
                one.attempt,
                one.worker,
                one.lane,
                one.restarts,
                one.cancel,
            )
            for one in state.sessions.values()
        },
        {name: sorted(worker.sessions) for name, worker in state.workers.items()},
        sorted(state.fenced),
        state.queued,
    )


def _check(model: Model) -> None:
    """The indexes agree with the sessions."""
    state = model.state
    assert state.queued == sum(one.status == "queued" for one in state.sessions.values())
    for worker in state.workers.values():
        here = [one for one in state.sessions.values() if one.worker == worker.name]
        assert {one.session_id for one in here} == worker.sessions
        for lane, count in worker.lane_counts.items():
            assert count == sum(one.lane == lane for one in here)
        assert len(here) <= worker.capacity_sessions or worker.capacity_sessions == 0
        if any(one.alone for one in here):
            assert len(here) == 1
    for one in state.sessions.values():
        assert one.worker is None or one.worker in state.workers


def _cpu_s_of(sessions: int) -> float:
    model = Model()
    for n in range(20):
        model.beat(f"w{n}", capacity_sessions=sessions // 20)
    began = process_time()
    for n in range(sessions):
        model.ask(request(n), f"e{n}")
    while found := model.tick():
        model.happens(found)
    for n in range(sessions):
        model.see(ended(session_id(n)))
    assert model.state.sessions == {}
    return process_time() - began


def test_a_session_costs_the_same_among_ten_thousand() -> None:
    few, many = min(_cpu_s_of(1_000) for _ in range(2)), _cpu_s_of(10_000)
    assert many < 30 * few, f"10 times the sessions cost {many / few:.0f} times as much"


# -- callers of outside services -------------------------------------------------------------------

ASKING, ASKING_BOTH = "d" * 64, "e" * 64


def places(intents: list[Intent]) -> dict[UUID, Place]:
    return {intent.session_id: intent for intent in intents if isinstance(intent, Place)}


def test_callers_of_a_service_run_as_its_budget_allows_and_hold_up_nobody() -> None:
    model = Model()
    model.asks(ASKING, "stock")
    model.asks(ASKING_BOTH, "price", "stock")
    model.declares("stock", 1.5)
    model.beat("w", capacity_sessions=100)
    for n in range(6):
        model.ask(request(n, reward_fn_hash=ASKING if n % 2 else ASKING_BOTH), f"c{n}")
    model.ask(request(7), "quiet")
    # 1.5 requests a second and a call every 2 s: three at a time. Who asks nobody passes them.
    found = places(model.tick())
    assert list(found) == [session_id(n) for n in (0, 1, 2, 7)]
    assert {place.lane for n, place in found.items() if n != session_id(7)} == {"w-1"}
    assert found[session_id(7)].lane == "w-0"
    assert places(model.tick()) == {}

    model.see(event_of(found[session_id(0)]))
    model.see(ended(session_id(0)))
    assert list(places(model.tick())) == [session_id(3)]

    model.declares("stock", 100.0, version=2)
    model.declares("stock", 0.1, version=1)  # late, and no longer what counts
    assert list(places(model.tick())) == [session_id(n) for n in (4, 5)]


def test_one_caller_runs_however_small_the_budget_is() -> None:
    model = Model()
    model.asks(ASKING, "stock")
    model.declares("stock", 0.1)
    model.beat("w")
    for n in range(3):
        model.ask(request(n, reward_fn_hash=ASKING), f"c{n}")
    assert list(places(model.tick())) == [session_id(0)]


def test_callers_are_counted_right_whatever_becomes_of_their_worker() -> None:
    model = Model()
    model.asks(ASKING, "stock")
    model.declares("stock", 1.0)
    model.beat("w")
    for n in range(4):
        model.ask(request(n, reward_fn_hash=ASKING), f"c{n}")
    found = places(model.tick())
    assert len(found) == 2
    model.see(event_of(found[session_id(0)]))  # of the other the placement is in flight
    model.see(WorkerFenced(fact=FencedFact(worker="w", reason="exit")))
    assert model.state.callers["stock"] == 0
    withdrawn(model.state, found[session_id(1)])
    assert model.state.callers["stock"] == 0
    model.beat("v")
    assert list(places(model.tick())) == [session_id(0), session_id(1)]
    model.see(SessionReleased(fact=ReleasedFact(session_id=session_id(0), attempt=1)))
    assert model.state.callers["stock"] == 2, "that attempt is over already"


# -- heartbeats that are rarer than expected -------------------------------------------------------


def beats_every(model: Model, period_s: float | None) -> None:
    fact = HeartbeatFact(worker="w1", node="n", state="ready", lanes=["w1-0"], capacity_sessions=9)
    told = HeartbeatCircumstance(period_s=period_s)
    hear(model.state, WorkerHeartbeat(fact=fact, circumstance=told), model.at_s)


def test_a_worker_that_beats_rarely_is_given_twice_the_time_between_its_beats() -> None:
    model = Model()
    beats_every(model, 10.0)
    model.pass_s(19.9)
    assert model.tick() == []
    model.pass_s(0.2)
    [fence] = model.tick()
    assert isinstance(fence, Fence)
    assert fence.detail == "no heartbeat for 20 s"


@pytest.mark.parametrize("period_s", [None, 0.1, 1.0])
def test_one_that_beats_often_or_does_not_say_is_given_the_limit(period_s: float | None) -> None:
    model = Model()
    beats_every(model, period_s)
    model.pass_s(4.1)
    assert [type(one) for one in model.tick()] == [Fence]


def test_a_scheduler_that_takes_over_waits_as_long_for_the_first_beat() -> None:
    model = Model()
    beats_every(model, 10.0)
    placed = event_of(model.place())
    assert placed.circumstance.heartbeat_period_s == 10.0
    new = Model()
    new.see(placed)
    new.pass_s(19.9)
    assert new.tick() == []
    new.pass_s(0.2)
    assert [type(one) for one in new.tick()] == [Fence]
    usual = Model()
    beats_every(usual, 1.0)
    assert event_of(usual.place()).circumstance.heartbeat_period_s is None
