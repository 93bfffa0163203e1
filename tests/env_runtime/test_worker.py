"""A worker on real servers: what it takes, what it publishes, and how it gives up."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from tests.env_runtime.conftest import (
    AGENT,
    ENV,
    WAIT_S_MAX,
    Probe,
    World,
    code_of,
    request_of,
    world_on,
)

from dsec.env_runtime import worker
from dsec.env_runtime.ends import UNPUBLISHABLE
from dsec.env_runtime.worker import Worker
from dsec.platform.bus import BusError, Message, PublishRefused, StreamOptions
from dsec_contracts import (
    SessionCancelRequested,
    SessionEnded,
    SessionPlaced,
    SessionReleased,
    SessionStarted,
    WorkerHeartbeat,
    parse,
    subjects,
)

pytestmark = [pytest.mark.nats, pytest.mark.postgres]

PROBED_AGENT = f"""{AGENT}
    def on_reward(self, *_):
        import probe
        probe.note("deliver")
"""
PROBED_ENV = f"""
import probe
probe.note("import")
{ENV}
class Probed(Env):
    def reset(self, **options):
        probe.note("start")
        return super().reset(**options)
    def step(self, action):
        probe.note("step")
        return super().step(action)
    def close(self):
        probe.note("close")
Env = Probed
"""
FINALIZED_AGENT, FINALIZED_ENV = (
    f"import probe\n{source}\n    def __del__(self): probe.note({of!r})\n"
    for source, of in ((AGENT, "agent"), (ENV, "env"))
)
SLOW_ENV = ENV.replace("self.n += 1", "self.n += 1; import time; time.sleep(0.02)")


async def heartbeats(world: World) -> list[WorkerHeartbeat]:
    """Heartbeats from now on, as they come."""
    found: list[WorkerHeartbeat] = []

    async def on_beat(headers: Mapping[str, str], data: bytes) -> None:
        event = parse(headers["ce-type"], data)
        assert isinstance(event, WorkerHeartbeat)
        found.append(event)

    await world.bus.listen("dsec.worker.heartbeat.*", on_beat)
    return found


# -- seats -------------------------------------------------------------------------------------


async def test_a_session_runs_from_its_placement_to_its_end_and_verifies(world: World) -> None:
    world.record()
    world.answering = True
    await world.worker()
    request = await world.run_session(max_steps=4)
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.steps) == ("completed", 4)
    assert len(world.events(SessionStarted, request.session_id)) == 1
    verdict = await world.verdict(request)
    assert (verdict.ok, verdict.complete) == (True, True)


async def test_a_placement_without_a_free_seat_is_handed_back(world: World) -> None:
    world.record()
    await world.worker(sessions_per_worker_max=1)
    first = await world.run_session()
    await world.stepped(first.session_id, 1)
    second = await world.run_session()
    released = await world.released(second.session_id)
    assert released.circumstance.reason == "no seat is free"
    assert not world.events(SessionEnded, second.session_id)


async def test_a_seat_is_free_again_after_an_end(world: World) -> None:
    world.record()
    world.answering = True
    await world.worker(sessions_per_worker_max=1)
    for _ in range(3):
        request = await world.run_session()
        assert (await world.ended(request.session_id)).fact.code == "max_steps"


async def test_a_start_that_fits_no_message_ends_its_session_and_not_the_worker(
    small_nats_url: str, log_url: str, tmp_path: Path
) -> None:
    async with world_on(small_nats_url, log_url, tmp_path) as world:
        world.record()
        world.answering = True
        await world.worker()
        large = ENV.replace("np.float32), {}", "np.float32), {'b': b'i' * 30_000}")
        request = await world.run_session(code_of(env=large))
        ended = await world.ended(request.session_id)
        assert (ended.fact.status, ended.fact.code) == ("failed", UNPUBLISHABLE)
        assert (await world.verdict(request)).first_divergence is None
        request = await world.run_session()
        assert (await world.ended(request.session_id)).fact.code == "max_steps"


async def test_heartbeats_name_in_turn_all_sessions_live_or_not_started_yet(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.env_runtime.heartbeats.SESSIONS_MAX", 1)
    await world.worker(heartbeat_period_s=0.05)
    opening = await world.run_session()  # it waits for its specs: nothing is recorded
    beats = await heartbeats(world)
    await world.until(lambda: named(beats) == {opening.session_id: "start"})
    (placed,) = await world.until(
        lambda: [m for m, event in world.seen if isinstance(event, SessionPlaced)]
    )
    assert beats[-1].circumstance.placements_read == placed.sequence
    world.record()
    await world.stepped(opening.session_id, 1)
    live = await world.run_session()
    await world.stepped(live.session_id, 1)
    beats.clear()
    # One that was under way may still name what the session waited for before.
    both = {opening.session_id: "reward", live.session_id: "reward"}
    await world.until(lambda: named(beats) == both)
    assert {beat.circumstance.sessions_total for beat in beats} == {2}
    assert {len(beat.circumstance.sessions) for beat in beats} == {1}


async def test_heartbeats_tell_the_resident_memory_of_the_worker(world: World) -> None:
    await world.worker(heartbeat_period_s=0.05)
    beats = await heartbeats(world)
    await world.until(lambda: len(beats) > 0)
    there = psutil.Process().memory_info().rss  # the worker runs in this process
    assert 0.5 * there < beats[-1].circumstance.memory_bytes < 2 * there


async def test_a_worker_whose_code_holds_every_file_it_may_open_goes_on_beating(
    world: World,
) -> None:
    await world.worker(heartbeat_period_s=0.05)
    beats = await heartbeats(world)
    with every_file_open():
        await world.until(lambda: len(beats) > 3 and not beats[-1].circumstance.memory_bytes)
    await world.until(lambda: beats[-1].circumstance.memory_bytes > 0)


@contextlib.contextmanager
def every_file_open() -> Iterator[None]:
    """No file can be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def named(beats: list[WorkerHeartbeat]) -> dict[UUID, str]:
    """The sessions that beats name, and what each was last said to wait for."""
    found: dict[UUID, str] = {}
    for beat in beats:
        told = beat.circumstance
        found |= dict(zip(told.sessions, told.waiting_on, strict=True))
    return found


# -- fence and drain -----------------------------------------------------------------------------


async def test_after_its_fence_a_worker_gets_nothing_in_and_its_run_ends(world: World) -> None:
    world.record()
    run = await world.worker()
    request = await world.run_session()
    [row] = await world.stepped(request.session_id, 1)
    await world.bus.fence("w1", "test")
    await world.reward(row)
    with pytest.raises(PublishRefused) as refused:
        await asyncio.wait_for(run.task, WAIT_S_MAX)
    assert refused.value.reason == "fenced"
    await asyncio.sleep(0.2)
    assert len(world.steps(request.session_id)) == 1


async def test_a_fenced_worker_starts_no_session(world: World) -> None:
    world.record()
    run = await world.worker()
    await world.bus.fence("w1", "test")
    request = await world.run_session()
    with pytest.raises(PublishRefused):
        await asyncio.wait_for(run.task, WAIT_S_MAX)
    await asyncio.sleep(0.2)
    assert not world.events(SessionStarted, request.session_id)


async def test_a_worker_that_is_fenced_under_load_ends_and_does_not_linger(world: World) -> None:
    world.record()
    world.answering = True
    run = await world.worker(lanes_per_worker=8)
    code = code_of()
    await world.register(code)
    requests = [request_of(code, max_steps=1_000_000) for _ in range(8)]
    for n, request in enumerate(requests):
        await world.place(request, lane=f"w1-{n}")
    for request in requests:
        await world.stepped(request.session_id, 5)
    await world.bus.fence("w1", "test")
    with pytest.raises(PublishRefused):
        await asyncio.wait_for(asyncio.shield(run.task), WAIT_S_MAX)


async def test_a_drain_releases_every_live_session_and_steps_none_afterwards(
    world: World,
) -> None:
    world.record()
    world.answering = True
    store = f"file://{world.folder}/blobs"  # storing observations, a lane gives way in mid-tick
    run = await world.worker(lanes_per_worker=2, object_store_url=store)
    beats = await heartbeats(world)
    code = code_of(kwargs={"size": 1000}, observations={"inline_bytes_max": 100})
    await world.register(code)
    requests = [request_of(code, max_steps=100_000) for _ in range(6)]
    for n, request in enumerate(requests):
        await world.place(request, lane=f"w1-{n % 2}")
    for request in requests:
        await world.stepped(request.session_id, 5)
    lanes = run.worker._lanes.values()
    while not any(lane._busy.locked() for lane in lanes):  # noqa: ASYNC110 - in mid-tick
        await asyncio.sleep(0)
    run.stop.set()
    await asyncio.wait_for(run.task, WAIT_S_MAX)
    await world.until(lambda: "draining" in {beat.fact.state for beat in beats})
    await asyncio.sleep(0.3)
    for request in requests:
        released = await world.released(request.session_id)
        rows = world.steps(request.session_id)
        assert released.circumstance.reason == "drain"
        assert released.circumstance.steps == len(rows)
        assert rows[-1].message.sequence < position_of(world, SessionReleased, request.session_id)


def position_of(world: World, kind: type[Any], session_id: UUID) -> int:
    """Where the first event of a kind about a session lies in the stream."""
    return next(
        message.sequence
        for message, event in world.seen
        if isinstance(event, kind) and event.fact.session_id == session_id
    )


# -- cancels -------------------------------------------------------------------------------------


async def test_a_cancel_that_comes_before_its_placement_counts(world: World) -> None:
    world.record()
    await world.worker()
    code = code_of()
    await world.register(code)
    request = request_of(code)
    await world.cancel(request.session_id)
    await world.place(request)
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.code) == ("cancelled", "cancelled")
    assert ended.fact.steps == 0
    assert not world.steps(request.session_id)


async def test_a_cancel_during_opening_counts(world: World) -> None:
    run = await world.worker()
    request = await world.run_session()  # it waits for its specs: nothing is recorded
    await world.until(lambda: request.session_id in run.worker.roster.opening)
    await world.cancel(request.session_id)
    await world.until(lambda: request.session_id in run.worker.roster.early.cancels)
    world.record()
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.steps) == ("cancelled", 0)
    assert (await world.verdict(request)).first_divergence is None


async def test_a_cancel_while_the_session_waits_for_a_reward_counts(world: World) -> None:
    world.record()
    await world.worker()
    request = await world.run_session()
    await world.stepped(request.session_id, 1)
    await world.cancel(request.session_id)
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.steps) == ("cancelled", 1)
    verdict = await world.verdict(request)
    assert (verdict.first_divergence, verdict.complete) == (None, True)


# -- replies to a lane that died -----------------------------------------------------------------


async def test_a_replaced_session_hears_what_went_to_its_previous_lane_while_it_lives(
    world: World,
) -> None:
    world.record()
    first = await world.worker()
    request = await world.run_session(max_steps=2)
    [row] = await world.stepped(request.session_id, 1)
    await first.close()
    del world.runs["w1"]

    second = await world.worker("w2")
    await world.place(request, "w2", 2, previous_lane="w1-0")
    await world.until(lambda: request.session_id in second.worker.roster.seats)
    await world.reward(row, lane="w1-0")
    last = (await world.stepped(request.session_id, 2))[1]
    assert (last.step, last.lane, last.attempt) == (1, "w2-0", 2)
    assert "lane-w1-0-for-w2-0-1" in await world.consumers()

    await world.reward(last)
    ended = await world.ended(request.session_id)
    assert (ended.fact.code, ended.fact.steps) == ("max_steps", 2)
    assert (await world.verdict(request)).ok
    async with asyncio.timeout(WAIT_S_MAX):
        while "lane-w1-0-for-w2-0-1" in await world.consumers():  # noqa: ASYNC110 - the server's
            await asyncio.sleep(0.1)
    # The server has answered before the worker has read the answer.
    await world.until(lambda: not second.worker.replies.followed)


# -- the running slot ----------------------------------------------------------------------------


async def test_the_slot_names_session_and_step_while_user_code_runs_and_nobody_otherwise(
    world: World, probe: Probe
) -> None:
    world.record()
    run = await world.worker()
    probe.slot = run.slot
    request = await world.run_session(code_of(PROBED_AGENT, PROBED_ENV), max_steps=2)
    for n in range(2):
        row = (await world.stepped(request.session_id, n + 1))[n]
        assert run.slot.read() is None
        await world.reward(row)
    await world.ended(request.session_id)
    await world.until(lambda: "close" in [where for where, _ in probe.notes])
    assert run.slot.read() is None
    assert [(where, running and running.step) for where, running in probe.notes] == [
        ("import", 0),
        ("start", 0),
        ("step", 0),
        ("deliver", 1),
        ("step", 1),
        ("deliver", 2),
        ("close", 2),
    ]
    assert {running.session_id for _, running in probe.notes if running} == {request.session_id}


async def test_what_a_finished_session_leaves_is_finalized_while_the_slot_names_it(
    world: World, probe: Probe
) -> None:
    world.record()
    world.answering = True
    run = await world.worker()
    probe.slot = run.slot
    request = await world.run_session(code_of(FINALIZED_AGENT, FINALIZED_ENV), max_steps=2)
    ended = await world.ended(request.session_id)
    assert ended.fact.status == "completed"
    await world.until(lambda: len(probe.notes) == 2)
    assert {where for where, _ in probe.notes} == {"agent", "env"}
    for _, running in probe.notes:
        assert running is not None
        assert (running.session_id, running.step) == (request.session_id, 2)
    assert run.slot.read() is None


async def test_each_step_of_a_re_execution_has_a_deadline_of_its_own(
    world: World, probe: Probe
) -> None:
    world.record()
    world.answering = True
    first = await world.worker()
    probe.slot = first.slot
    request = await world.run_session(code_of(PROBED_AGENT, PROBED_ENV), max_steps=100_000)
    await world.stepped(request.session_id, 20)
    world.answering = False
    await first.close()
    del world.runs["w1"]

    second = await world.worker("w2")
    probe.slot = second.slot
    probe.notes.clear()
    await world.place(request, "w2", 2, previous_lane="w1-0")
    await world.until(lambda: request.session_id in second.worker.roster.seats)
    again = [running for where, running in probe.notes if where == "step"]
    assert len(again) >= 20
    assert [running and running.step for running in again] == list(range(len(again)))
    assert {running.session_id for running in again if running} == {request.session_id}
    since = [running.since_ns for running in again if running]
    assert len(set(since)) == len(since)


async def test_re_executing_a_long_record_gives_way_to_heartbeats_and_other_sessions(
    world: World,
) -> None:
    world.record()
    world.answering = True
    first = await world.worker()
    request = await world.run_session(code_of(env=SLOW_ENV), max_steps=100_000)
    await world.stepped(request.session_id, 120)
    await first.close()
    del world.runs["w1"]

    second = await world.worker("w2", heartbeat_period_s=0.1)
    code = code_of()
    await world.register(code)
    other = request_of(code, max_steps=100_000)
    await world.place(other, "w2")
    await world.stepped(other.session_id, 3)
    beats = await heartbeats(world)
    await world.place(request, "w2", 2, previous_lane="w1-0")
    await world.until(lambda: request.session_id in second.worker.roster.opening)
    beaten, stepped = len(beats), len(world.steps(other.session_id))
    await world.until(lambda: request.session_id in second.worker.roster.seats)
    assert len(beats) - beaten >= 3
    times = [row.message.time for row in world.steps(other.session_id)[stepped:]]
    gaps_s = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    assert sum(gaps_s) > 2.0  # 120 steps of 0.02 s, a few of them before it was seen
    assert max(gaps_s) < sum(gaps_s) / 2, "it did not wait for the whole of it"


# -- placements, their acknowledgement, and their consumer ---------------------------------------


class Dies(Exception):
    """The worker dies."""


class DiesTaking(Worker):
    """A worker that dies while it takes what was delivered."""

    def _place(self, event: SessionPlaced, message: Message) -> None:
        raise Dies

    def _cancel(self, event: SessionCancelRequested) -> None:
        raise Dies


@pytest.mark.parametrize("what", ["placement", "cancel"])
async def test_what_a_worker_died_taking_was_not_acknowledged(world: World, what: str) -> None:
    run = await world.worker(kind=DiesTaking)
    request = request_of(code_of())
    if what == "placement":
        await world.place(request)
    else:
        await world.cancel(request.session_id)
    with pytest.raises(ExceptionGroup) as died:
        await asyncio.wait_for(run.task, WAIT_S_MAX)
    assert died.group_contains(Dies)
    await asyncio.sleep(0.2)
    [state] = [state for state in await world.bus.consumers() if state.name == "worker-w1"]
    assert state.ack_pending == 1


async def test_what_a_worker_took_is_acknowledged(world: World) -> None:
    world.record()
    world.answering = True
    await world.worker()
    request = await world.run_session()
    await world.ended(request.session_id)
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            [state] = [one for one in await world.bus.consumers() if one.name == "worker-w1"]
            if (state.pending, state.ack_pending) == (0, 0):
                break
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("consumer", ["worker-w1", "lane-w1-0"])
async def test_a_consumer_that_is_gone_ends_the_worker(world: World, consumer: str) -> None:
    run = await world.worker()
    await asyncio.sleep(0.2)
    await world.bus.delete_consumer(consumer)
    with pytest.raises(ExceptionGroup) as gone:
        await asyncio.wait_for(run.task, WAIT_S_MAX)
    assert gone.group_contains(BusError, match=f"{consumer} is gone")


async def test_lanes_stop_before_the_stream_is_full_and_go_on_when_there_is_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "STREAM_WATCH_S", 0.05)
    world.answering = True
    world.record()
    await world.worker()
    request = await world.run_session(max_steps=100_000)
    await world.stepped(request.session_id, 5)
    await world.bus.ensure_stream(StreamOptions(max_bytes=4 << 20))
    filler = subjects.dead_letter("filler")
    for _ in range(38):
        await world.bus.publish_raw(filler, bytes(100 << 10), {})
    steps = -1
    async with asyncio.timeout(WAIT_S_MAX):
        while (now := len(world.steps(request.session_id))) != steps:  # until it stands still
            steps = now
            await asyncio.sleep(0.5)
    # Everything else still fits.
    await world.register(code_of())
    await world.bus.purge(filler, (await world.bus.stream_state()).last_sequence)
    await world.stepped(request.session_id, steps + 5)
    await world.cancel(request.session_id)
    await world.ended(request.session_id)
