"""Placement rules: properties that hold for every snapshot."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.scheduler.placement import (
    LANE_FILL_SESSIONS,
    Assignment,
    Snapshot,
    Waiting,
    WorkerLoad,
    round_robin,
)

waiting = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30).map(
    lambda flags: tuple(Waiting(UUID(int=n), *each) for n, each in enumerate(flags))
)


@st.composite
def workers(draw: st.DrawFn) -> tuple[WorkerLoad, ...]:
    found = []
    for n in range(draw(st.integers(0, 5))):
        counts = [draw(st.integers(0, 5)) for _ in range(draw(st.integers(0, 3)))]
        callers = [(f"w{n}-{k}", draw(st.integers(0, count))) for k, count in enumerate(counts)]
        found.append(
            WorkerLoad(
                f"w{n}",
                tuple((f"w{n}-{k}", count) for k, count in enumerate(counts)),
                draw(st.integers(0, 12)),
                isolated=draw(st.booleans()),
                held=draw(st.booleans()),
                callers=tuple((lane, count) for lane, count in callers if count),
            )
        )
    return tuple(found)


@given(waiting, workers())
def test_every_assignment_is_allowed(
    queue: tuple[Waiting, ...], loads: tuple[WorkerLoad, ...]
) -> None:
    found = round_robin(Snapshot(queue, loads))
    alone = {one.session_id: one.alone for one in queue}
    by_name = {load.name: load for load in loads}
    assert len({one.session_id for one in found}) == len(found)
    assert {one.session_id for one in found} <= set(alone)
    taken = Counter(one.worker for one in found)
    for one in found:
        load = by_name[one.worker]
        assert one.lane in dict(load.lanes)
        assert not load.held
        assert load.sessions + taken[one.worker] <= load.capacity_sessions
        if alone[one.session_id]:
            assert load.sessions == 0
            assert taken[one.worker] == 1
            assert load.isolated or not any(
                w.isolated and w.capacity_sessions and w.lanes for w in loads
            )
        else:
            assert not load.isolated


@given(waiting, workers())
def test_nobody_waits_while_there_is_room(
    queue: tuple[Waiting, ...], loads: tuple[WorkerLoad, ...]
) -> None:
    found = round_robin(Snapshot(queue, loads))
    placed = {one.session_id for one in found}
    left = [one for one in queue if one.session_id not in placed and not one.alone]
    taken = Counter(one.worker for one in found)
    for load in loads:
        if load.lanes and not (load.isolated or load.held) and left:
            suspect = any(one.alone and one.session_id in placed for one in queue)
            free = load.capacity_sessions - load.sessions - taken[load.name]
            assert free <= 0 or suspect


@given(waiting, workers())
def test_order_of_the_queue_is_kept(
    queue: tuple[Waiting, ...], loads: tuple[WorkerLoad, ...]
) -> None:
    placed = {one.session_id for one in round_robin(Snapshot(queue, loads))}
    for alone in (False, True):
        flags = [one.session_id in placed for one in queue if one.alone == alone]
        assert flags == sorted(flags, reverse=True)


def test_a_suspect_does_not_take_the_last_worker_from_the_others() -> None:
    queue = (Waiting(UUID(int=1), alone=True), Waiting(UUID(int=2)))
    one = WorkerLoad("a", (("a-0", 0),), 9)
    assert [found.session_id for found in round_robin(Snapshot(queue, (one,)))] == [UUID(int=2)]
    two = (one, WorkerLoad("b", (("b-0", 0),), 9))
    assert len(round_robin(Snapshot(queue, two))) == 2
    assert len(round_robin(Snapshot(queue[:1], (one,)))) == 1


@pytest.mark.parametrize(
    ("sessions", "expected"),
    [
        (10, {"a-0": 5, "b-0": 5}),
        (2 * LANE_FILL_SESSIONS, {"a-0": LANE_FILL_SESSIONS, "b-0": LANE_FILL_SESSIONS}),
        (2 * LANE_FILL_SESSIONS + 3, {"a-0": 256, "b-0": 256, "a-1": 2, "b-1": 1}),
        (8 * LANE_FILL_SESSIONS, dict.fromkeys(("a-0", "a-1", "b-0", "b-1"), 512)),
    ],
)
def test_workers_share_evenly_and_fill_one_lane_after_the_other(
    sessions: int, expected: dict[str, int]
) -> None:
    queue = tuple(Waiting(UUID(int=n)) for n in range(sessions))
    loads = tuple(WorkerLoad(w, ((f"{w}-0", 0), (f"{w}-1", 0)), 5000) for w in ("a", "b"))
    assert Counter(one.lane for one in round_robin(Snapshot(queue, loads))) == expected


@given(waiting, workers())
def test_who_waits_for_services_shares_no_lane_with_others_where_there_are_two(
    queue: tuple[Waiting, ...], loads: tuple[WorkerLoad, ...]
) -> None:
    kinds = {one.session_id: one for one in queue}
    lanes = {lane: load for load in loads for lane, _ in load.lanes}
    found = [one for one in round_robin(Snapshot(queue, loads)) if not kinds[one.session_id].alone]
    calling = {one.lane for one in found if kinds[one.session_id].calls}
    for lane in {one.lane for one in found if not kinds[one.session_id].calls} & calling:
        assert len(lanes[lane].lanes) == 1
    for load in loads:
        assert len(calling & dict(load.lanes).keys()) <= 1


def test_those_who_wait_for_services_are_spread_by_themselves() -> None:
    queue = tuple(Waiting(UUID(int=n), calls=n % 2 == 1) for n in range(40))
    loads = (
        WorkerLoad("a", (("a-0", 30), ("a-1", 4)), 99, callers=(("a-1", 4),)),
        WorkerLoad("b", (("b-0", 0), ("b-1", 0)), 99),
    )
    found = Counter(one.lane for one in round_robin(Snapshot(queue, loads)))
    assert found["a-1"] + 4 == found["b-1"] == 12
    assert found["b-0"] > found["a-0"]


def test_others_that_came_first_are_not_in_the_lane_of_those_who_wait_for_services() -> None:
    lanes = tuple((f"a-{n}", 0) for n in range(3))
    queue = tuple(Waiting(UUID(int=n)) for n in range(3 * LANE_FILL_SESSIONS))
    found = Counter(
        one.lane for one in round_robin(Snapshot(queue, (WorkerLoad("a", lanes, 5000),)))
    )
    assert found == {"a-0": 512, "a-1": 256}
    later = WorkerLoad("a", (("a-0", 512), ("a-1", 256), ("a-2", 0)), 5000)
    (caller,) = round_robin(Snapshot((Waiting(UUID(int=9999), calls=True),), (later,)))
    assert caller.lane == "a-2"


def test_the_least_loaded_worker_comes_first() -> None:
    loads = (WorkerLoad("a", (("a-0", 3), ("a-1", 1)), 9), WorkerLoad("b", (("b-0", 2),), 9))
    assert round_robin(Snapshot((Waiting(UUID(int=1)),), loads)) == [
        Assignment(UUID(int=1), "b", "b-0")
    ]
