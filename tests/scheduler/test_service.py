"""The scheduler on real servers: what it publishes, and what it does when others fail."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import replace
from datetime import timedelta
from time import monotonic, process_time
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from tests.scheduler.conftest import request_fact

from dsec.platform.bus import PublishRefused
from dsec.platform.clock import utc_now
from dsec.platform.service import EXIT_AGAIN
from dsec.scheduler.effects import Effects, Withdrawn
from dsec.scheduler.handlers import Scheduler
from dsec.scheduler.intents import End, Place
from dsec.scheduler.leadership import LEASE_TTL_S, Leadership, LeadershipLost
from dsec.scheduler.settings import SchedulerConfig
from dsec.session.chain import chain_end
from dsec_contracts import (
    BY_TYPE,
    Envelope,
    SessionCancelRequested,
    SessionEnded,
    SessionPlaced,
    SessionRejected,
    SessionReleased,
    SessionRequested,
    WorkerFenced,
    keys,
)
from dsec_contracts.canonical import encode
from dsec_contracts.service import ServiceDeclared, ServiceFact
from dsec_contracts.session import CancelFact, EndedFact, ReleasedFact
from dsec_contracts.spec import SpecCircumstance
from dsec_contracts.worker import Culprit

pytestmark = [pytest.mark.nats, pytest.mark.postgres]

NO_INPUTS = encode([])
CONFIG_QUICK = """
heartbeat_period_s: 0.3
heartbeat_limit_s: 0.6
"""
CONFIG_ABSENT = """
heartbeat_period_s: 0.5
heartbeat_limit_s: 4.0
session_absent_limit_s: 1.0
"""


async def cancel(world: Any, session_id: UUID) -> None:
    event = SessionCancelRequested(fact=CancelFact(session_id=session_id))
    await world.publish(event, session_id, session_id=session_id)


async def send(world: Any, name: str, key: object, body: bytes, **headers: str) -> str:
    """Publish bare bytes, as any system could."""
    event_id = uuid4().hex
    given = {
        "ce-id": event_id,
        "ce-type": f"{name}.v1",
        "ce-source": "test",
        "ce-time": utc_now().isoformat(),
        **{header.replace("_", "-"): value for header, value in headers.items()},
    }
    given = {header: value for header, value in given.items() if value}
    await world.bus.publish_raw(f"dsec.{name}.{key}", body, given)
    return event_id


async def test_sessions_are_placed_fast_and_spread(world: Any) -> None:
    world.lead()
    world.worker("w1", capacity=500)
    world.worker("w2", capacity=500)
    first = await world.request()
    placed: SessionPlaced = await world.placed(first.session_id)
    assert placed.circumstance.request == first
    assert (placed.fact.attempt, placed.fact.previous_lane) == (1, None)
    began = process_time()  # others may have the core meanwhile
    await asyncio.gather(*(world.request() for _ in range(600)))
    await world.until(lambda: len(world.events(SessionPlaced)) == 601)
    # Far below what it does on its own: everything here shares one process.
    assert 600 / (process_time() - began) > 50
    workers = [event.fact.worker for event in world.events(SessionPlaced)]
    assert all(280 <= workers.count(worker) <= 320 for worker in ("w1", "w2"))


async def test_what_is_refused_says_why(world: Any) -> None:
    world.lead()
    await (
        world.led()
    )  # what is malformed is not in the log, which is all that one who comes later has
    first = await world.request()
    body = SessionRequested(fact=first).body()
    value = json.loads(body)

    def changed(**changes: Any) -> bytes:
        return json.dumps({"fact": {**value["fact"], **changes}}).encode()

    fresh = "01987654-0000-7000-8000-000000000001"
    cases = [
        (changed(max_steps=0), "malformed", "fact.max_steps"),
        (changed(session_id="no id"), "malformed", "fact.session_id"),
        (b"{", "malformed", None),
        (b"\xff\x00", "malformed", None),
        (b'{"fact": 3}', "malformed", "fact"),
        (changed(session_id=fresh, agent_spec="0" * 64), "unregistered_spec", "agent_spec"),
        (changed(session_id=fresh, env_spec=first.agent_spec), "id_in_use", "session_id"),
        (changed(seed=8), "id_in_use", "session_id"),
    ]
    for number, (sent, code, field) in enumerate(cases):
        event_id = await send(world, "session.requested", f"any{number}", sent)
        (found,) = await world.until(lambda: world.events(SessionRejected, event_id=event_id))  # noqa: B023
        assert (found.fact.code, found.fact.field) == (code, field), found
    assert world.events(SessionRejected)[1].fact.session_id == "no id"
    for headers, field in (({"ce_time": "noon"}, "ce-time"), ({"ce_type": "a.b.v1"}, "ce-type")):
        event_id = await send(world, "session.requested", "any", body, **headers)
        (found,) = await world.until(lambda: world.events(SessionRejected, event_id=event_id))  # noqa: B023
        assert (found.fact.code, found.fact.field) == ("malformed", field)
    await send(world, "session.requested", "any", body, ce_id="")
    await world.until(lambda: len(world.events(SessionRejected)) == len(cases) + 3)
    await send(world, "session.requested", "any", body)  # the same facts again: nothing
    world.worker("w1")
    await world.placed(first.session_id)
    assert len(world.events(SessionPlaced)) == 1
    assert len(world.events(SessionRejected)) == len(cases) + 3


async def test_garbage_on_any_subject_stops_nothing(world: Any) -> None:
    world.lead()
    world.worker("w1")
    fact = await world.request()
    await world.placed(fact.session_id)
    for event in BY_TYPE.values():
        if event.durable:
            for body in (b"", b"[]", b'{"fact": {}}', b"\xff", SessionRequested(fact=fact).body()):
                await send(world, event.event_name(), fact.session_id, body)
    await send(
        world,
        "worker.fenced",
        "w1",
        SessionRequested(fact=fact).body(),
        ce_type="session.requested.v1",
    )
    await world.bus.publish_transient(
        SessionRequested(fact=fact), "x", source="t", time=utc_now(), event_id="x"
    )
    other = await world.request()
    await world.placed(other.session_id)


async def test_cancel_and_deadline(world: Any) -> None:
    world.lead()
    world.worker("w0", capacity=0)
    waiting = await world.request()
    await cancel(world, waiting.session_id)
    await world.ended(waiting.session_id)
    too_late = await world.request(deadline=utc_now() - timedelta(seconds=1))
    for fact, code in ((waiting, "cancelled"), (too_late, "deadline")):
        ended = await world.ended(fact.session_id)
        expected = chain_end(None, "cancelled", code, 0, 0, NO_INPUTS)
        assert (ended.fact.status, ended.fact.code, ended.fact.steps) == ("cancelled", code, 0)
        assert (ended.fact.chain, ended.fact.inputs) == (expected, NO_INPUTS)
    world.worker("w1")
    placed = await world.request(deadline=utc_now() + timedelta(seconds=3.0))
    await world.placed(placed.session_id)
    found = await world.until(
        lambda: world.events(SessionCancelRequested, session_id=placed.session_id)
    )
    await asyncio.sleep(0.5)
    assert [one.circumstance.code for one in found] == ["deadline"]
    assert len(world.events(SessionCancelRequested)) == 2, "asked for once"
    assert not world.events(SessionEnded, session_id=placed.session_id), "its worker ends it"
    assert len(world.events(SessionPlaced)) == 1


async def test_a_silent_worker_is_fenced_first_and_its_sessions_move(world: Any) -> None:
    world.lead()
    world.worker("w1")
    keeps, cancelled = await world.request(), await world.request()
    first = await world.placed(keeps.session_id)
    chain = await world.starts(await world.placed(cancelled.session_id))
    await cancel(world, cancelled.session_id)
    world.worker("w2")
    world.silence("w1")
    began = monotonic()
    again = await world.placed(keeps.session_id, attempt=2)
    assert monotonic() - began < 20.0
    assert (again.fact.worker, again.fact.previous_lane) == ("w2", first.fact.lane)
    subjects = [message.subject for message, _ in world.seen]
    assert (
        subjects.index("dsec.fence.w1")
        < subjects.index("dsec.worker.fenced.w1")
        < len(subjects) - subjects[::-1].index(f"dsec.session.placed.{keeps.session_id}") - 1
    )
    zombie = SessionReleased(fact=ReleasedFact(session_id=keeps.session_id, attempt=1))
    with pytest.raises(PublishRefused, match="fenced"):
        await world.publish(zombie, keeps.session_id, fence="w1")
    # The other one was cancelled, and nobody but the scheduler is left to end it: from the log.
    ended = await world.ended(cancelled.session_id)
    assert (ended.fact.status, ended.fact.code, ended.fact.steps) == ("cancelled", "cancelled", 0)
    assert ended.fact.chain == chain_end(chain, "cancelled", "cancelled", 0, 0, NO_INPUTS)
    assert ended.circumstance.attempt == 1


async def test_a_server_that_stands_still_makes_no_worker_silent(world: Any) -> None:
    world.lead(CONFIG_QUICK)
    world.worker("w1")
    placed = await world.placed((await world.request()).session_id)
    server = world.nats_server()
    server.suspend()
    try:
        await asyncio.sleep(1.2)
    finally:
        server.resume()
    await asyncio.sleep(0.5)
    assert not world.events(WorkerFenced)
    world.silence("w1")
    await world.until(lambda: len(world.events(WorkerFenced)) == 1)
    assert world.events(WorkerFenced)[0].fact.worker == placed.fact.worker


async def test_a_worker_that_lost_a_session_is_fenced(world: Any) -> None:
    world.lead(CONFIG_ABSENT)
    world.worker("w1", capacity=2)
    kept, lost = await world.request(), await world.request()
    for fact in (kept, lost):
        await world.placed(fact.session_id)
    world.named["w1"] = [kept.session_id, lost.session_id]
    await asyncio.sleep(1.5)
    assert not world.events(WorkerFenced)
    world.worker("w2")
    world.named["w1"] = [kept.session_id]
    again = await world.placed(lost.session_id, attempt=2)
    assert again.fact.worker == "w2"
    (fenced,) = world.events(WorkerFenced)
    assert fenced.fact.worker == "w1"
    assert str(lost.session_id) in fenced.circumstance.detail
    await world.placed(kept.session_id, attempt=2)


async def test_a_session_that_kills_its_worker_twice_ends(world: Any) -> None:
    world.lead()
    world.worker("w1")
    world.worker("iso1", isolated=True, capacity=1)
    fact = await world.request()
    await world.placed(fact.session_id)
    culprit = Culprit(session_id=fact.session_id, step=0)
    world.dies("w1", "signal", culprit)
    again = await world.placed(fact.session_id, attempt=2)
    assert (again.fact.worker, again.fact.alone) == ("iso1", True)
    chain = await world.starts(again)
    world.dies("iso1", "oom", culprit)
    ended = await world.ended(fact.session_id)
    assert (ended.fact.status, ended.fact.code) == ("failed", "oom")
    assert ended.fact.chain == chain_end(chain, "failed", "oom", 0, 0, NO_INPUTS)
    (fenced,) = world.events(WorkerFenced, worker="iso1")
    assert (fenced.fact.reason, fenced.fact.culprit) == ("oom", culprit)


async def _done(world: Any, placed: SessionPlaced) -> None:
    fact = EndedFact(
        session_id=placed.fact.session_id,
        status="completed",
        code="max_steps",
        steps=1,
        episodes=0,
        inputs=NO_INPUTS,
        chain=bytes(32),
    )
    await world.publish(SessionEnded(fact=fact), fact.session_id, fence=placed.fact.worker)


async def test_another_one_takes_over(world: Any) -> None:
    """Stopped at any moment: the next one knows what the first knew, and places nothing twice,
    even where the first one wakes up again."""
    first = world.start("scheduler")
    world.worker("w1", capacity=2)
    spec = world.spec("agent", {"name": "registered too late"})
    rejected = await world.request(agent_spec=spec.fact.spec_hash)
    (refusal,) = await world.until(lambda: world.events(SessionRejected))
    await world.publish(spec, spec.fact.spec_hash)
    await world.logged(keys.SYSTEM_SESSION, keys.rejected(refusal.fact.event_id))
    done, lives, waits = [await world.request() for _ in range(3)]
    gone = await world.request()
    await cancel(world, gone.session_id)
    await world.ended(gone.session_id)
    await _done(world, await world.placed(done.session_id))
    lives_at = await world.placed(lives.session_id)
    await world.placed(waits.session_id)
    late = await world.request()
    for fact in (rejected, lives, waits, late):
        await world.logged(fact.session_id)
    await world.logged(waits.session_id, keys.placed(1))
    first.send_signal(signal.SIGSTOP)
    world.lead()
    world.dies("w1", "exit", Culprit(session_id=waits.session_id, step=4))
    world.worker("w2", capacity=10)
    world.worker("iso", capacity=1, isolated=True)
    again = await world.placed(lives.session_id, attempt=2)
    assert (again.fact.worker, again.fact.previous_lane) == ("w2", lives_at.fact.lane)
    suspect = await world.placed(waits.session_id, attempt=2)
    assert (suspect.fact.worker, suspect.fact.alone) == ("iso", True)
    await world.placed(late.session_id)
    first.send_signal(signal.SIGCONT)
    # Ids of sessions that only the log remembers are still theirs.
    other = SessionRequested(fact=done.model_copy(update={"seed": 99}))
    await world.publish(other, done.session_id, event_id="other-facts")
    await world.publish(SessionRequested(fact=done), done.session_id, event_id="same-facts")
    (found,) = await world.until(lambda: world.events(SessionRejected, event_id="other-facts"))
    assert found.fact.code == "id_in_use"
    await world.placed((await world.request()).session_id)
    assert not world.events(SessionRejected, event_id="same-facts")
    assert await asyncio.to_thread(first.wait, 60) == 1, "it cannot know whether it leads"
    attempts = [(e.fact.session_id, e.fact.attempt) for e in world.events(SessionPlaced)]
    assert len(attempts) == len(set(attempts))
    placed = {session_id for session_id, _ in attempts}
    assert rejected.session_id not in placed
    assert gone.session_id not in placed
    assert (done.session_id, 2) not in attempts
    assert {event.fact.worker for event in world.events(WorkerFenced)} == {"w1"}


async def test_budgets_hold_across_schedulers(world: Any) -> None:
    """The one that takes over knows from the log which services are asked, and how many may."""
    asking = world.spec("reward", {"asks": "stock"})
    told = asking.model_copy(update={"circumstance": SpecCircumstance(services=["stock"])})
    await world.publish(told, asking.fact.spec_hash)
    terms = {"base_url": "http://localhost", "qps_budget": 1.0}
    declared = ServiceFact.model_validate({"name": "stock", "version": 1, **terms})
    await world.publish(ServiceDeclared(fact=declared), "stock")
    world.worker("w")
    first = world.start("scheduler")
    asked = [await world.request(reward_fn_hash=asking.fact.spec_hash) for _ in range(4)]
    await world.placed(asked[1].session_id)
    first.terminate()
    await asyncio.to_thread(first.wait, 60)
    world.lead()
    quiet = await world.request()
    await world.placed(quiet.session_id)
    assert len(world.events(SessionPlaced)) == 3
    ended = EndedFact(
        session_id=asked[0].session_id, status="completed", code="max_steps", steps=0, episodes=0,
        inputs=b"", chain=b"",
    )  # fmt: skip
    await world.publish(SessionEnded(fact=ended), asked[0].session_id)
    await world.placed(asked[2].session_id)
    assert not world.events(SessionPlaced, session_id=asked[3].session_id)


async def test_of_two_placements_one_wins(world: Any) -> None:
    effects = Effects(world.bus, world.history, epoch=1, restart_wait_s=1.0, now=utc_now)
    fact = await world.request()

    def place(worker: str, attempt: int, expected: int) -> Place:
        lane, cause = f"{worker}-0", keys.of(fact.session_id, keys.REQUESTED)
        return Place(
            fact.session_id, worker, lane, attempt, None, False, "test", cause, expected, fact
        )

    assert await effects.carry_out(place("mine", 1, 0)) is None
    refused = await effects.carry_out(place("theirs", 2, 0))
    won = await world.bus.last_sequence(f"dsec.session.placed.{fact.session_id}")
    assert refused == Withdrawn(won)
    assert await effects.carry_out(place("theirs", 2, won)) is None
    await world.placed(fact.session_id, attempt=2)


async def test_sigterm_hands_over(world: Any) -> None:
    process = world.start("scheduler")
    world.worker("w1")
    await world.placed((await world.request()).session_id)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 60) == 0
    world.lead()
    await world.placed((await world.request()).session_id)
    assert not world.events(WorkerFenced), "a new one calls nobody dead whom it has not heard yet"


async def _with_clock(world: Any, lag_s: list[float], *, lease_too: bool) -> asyncio.Task[None]:
    """A scheduler whose clock can be put forward."""

    def clock() -> float:
        return monotonic() + lag_s[0]

    lease = await world.bus.lease("scheduler", "test", LEASE_TTL_S)
    leadership = Leadership(lease, clock if lease_too else monotonic)
    await leadership.take(world.stop)
    scheduler = Scheduler(
        world.bus,
        world.history,
        SchedulerConfig(),
        leadership,
        now=utc_now,
        monotonic=clock,
    )
    running = asyncio.create_task(scheduler.run(world.stop))
    if not lease_too:
        world.tasks.append((asyncio.create_task(leadership.keep(world.stop)), world.stop))
    world.worker("w1")
    await world.placed((await world.request()).session_id)
    return running


async def test_a_scheduler_that_slept_calls_nobody_dead(world: Any) -> None:
    """Its clock has moved on, but nobody could be heard meanwhile."""
    lag_s = [0.0]
    running = await _with_clock(world, lag_s, lease_too=False)
    world.silence("w1")
    lag_s[0] = 60.0
    await asyncio.sleep(0.5)
    assert not world.events(WorkerFenced)
    world.stop.set()
    await running


async def test_a_scheduler_that_may_have_lost_its_lease_stops(world: Any) -> None:
    """Two of them would take messages of one consumer from each other."""
    lag_s = [0.0]
    running = await _with_clock(world, lag_s, lease_too=True)
    lag_s[0] = LEASE_TTL_S
    with pytest.raises(ExceptionGroup) as stopped:
        async with asyncio.timeout(60):
            await running
    assert stopped.group_contains(LeadershipLost)


async def test_no_end_before_the_log_has_passed_the_fence(world: Any) -> None:
    effects = Effects(world.bus, world.history, epoch=1, restart_wait_s=0.5, now=utc_now)
    fact = await world.request()
    sequence = (await world.bus.stream_state()).last_sequence
    end = End(fact.session_id, "failed", "oom", "", 1, "cause", sequence + 5)
    assert await effects.carry_out(end) == Withdrawn(None)
    assert not world.events(SessionEnded)
    assert await effects.carry_out(replace(end, log_sequence=sequence)) is None
    await world.ended(fact.session_id)


async def test_requests_beyond_the_bound_wait_in_the_log(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.lead("sessions_queued_max: 3")
    world.worker("w0", capacity=1)
    first = await world.request()
    await world.placed(first.session_id)
    facts = [await world.request() for _ in range(10)]
    await cancel(world, facts[8].session_id)
    await world.logged(facts[8].session_id, keys.CANCEL_REQUESTED)
    world.worker("w1")
    for fact in facts[:8] + facts[9:]:
        await world.placed(fact.session_id)
    ended = await world.ended(facts[8].session_id)
    assert (ended.fact.code, ended.fact.steps) == ("cancelled", 0)
    order = [event.fact.session_id for event in world.events(SessionPlaced)][1:]
    assert set(order[:3]) == {fact.session_id for fact in facts[:3]}
    assert len(order) == 9
    assert "3 sessions wait: later requests wait in the log" in caplog.text


async def test_a_request_that_an_earlier_version_put_aside_is_placed_whoever_is_upgraded_first(
    world: Any,
) -> None:
    """Scheduler before recorder: it leads, and then the log gets what lies behind its floor."""
    fact = request_fact()
    headers = Envelope("asked", "session.requested.v9", "test", utc_now()).headers()
    body = SessionRequested(fact=fact).body()
    subject = f"dsec.session.requested.{fact.session_id}"
    await world.bus.publish_raw(subject, body, headers)
    await world.until(lambda: world.sql("select 1 from event_parked"))
    with psycopg.connect(world.database_url) as connection:
        connection.execute(  # of the type as this version knows it
            "update event_parked set event_type = 'session.requested.v1',"
            " headers = replace(headers::text, 'v9', 'v1')::json"
        )
    world.worker("w")
    first = world.start("scheduler")
    async with asyncio.timeout(30):  # it leads: what it read of the log did not have the request
        while "scheduler" not in {c.name for c in await world.bus.consumers()}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    recording, stop = world.tasks.pop(0)
    stop.set()
    await recording
    world.record()
    await world.logged(fact.session_id)
    assert await asyncio.to_thread(first.wait, 90) == EXIT_AGAIN
    world.start("scheduler")  # as whoever supervises it does
    await world.placed(fact.session_id)
