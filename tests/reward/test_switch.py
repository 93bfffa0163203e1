"""Synchronous or deferred: at once where a service is slow, and back only when it is calm."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dsec.reward.switch import (
    RECOVER_S,
    REPORT_S_MAX,
    SAMPLES_MIN,
    WINDOW_S,
    Latencies,
    Report,
    Standing,
    decide,
)

THRESHOLD_MS = 200.0


def after(*reports: tuple[float, str, float | None]) -> Standing:
    standing = Standing()
    for at, replica, p95_ms in reports:
        standing = decide(standing, replica, Report(at, p95_ms), THRESHOLD_MS)
    return standing


def test_above_the_threshold_it_is_deferred_at_once() -> None:
    assert after((0, "a", 200.0)).mode == "synchronous"
    slow = after((0, "a", 50.0), (1, "b", 201.0))
    assert (slow.mode, slow.since) == ("deferred", 1)


def test_back_only_when_it_was_fast_for_some_seconds() -> None:
    slow = [(0.0, "a", 500.0)]
    assert after(*slow, (1, "a", 99.0), (0.9 + RECOVER_S, "a", 99.0)).mode == "deferred"
    assert after(*slow, (1, "a", 99.0), (1 + RECOVER_S, "a", 99.0)).mode == "synchronous"
    # Between the half and the whole nothing changes, and the seconds begin anew.
    between = after(*slow, (1, "a", 99.0), (3, "a", 150.0), (4, "a", 99.0), (1 + RECOVER_S, "a", 9))
    assert between.mode == "deferred"


def test_a_replica_that_still_sees_it_slow_holds_the_others() -> None:
    calm = [(t, "a", 10.0) for t in range(1, 20)]
    slow = [(t + 0.5, "b", 150.0) for t in range(1, 20)]
    assert after((0, "a", 500.0), *sorted(calm + slow)).mode == "deferred"
    # A dead one does not.
    assert after((0, "b", 500.0), *calm).mode == "synchronous"
    assert set(after((0, "b", 500.0), *calm).reports) == {"a"}


def test_a_replica_whose_clock_was_ahead_holds_nobody_once_it_is_gone() -> None:
    ahead_s = 3600.0
    wrong = after((ahead_s, "a", 500.0), (ahead_s + 1, "a", 10.0))
    assert (wrong.mode, wrong.calm_since) == ("deferred", ahead_s + 1)
    standing = wrong
    for at in (2.0, 2.0 + RECOVER_S):
        standing = decide(standing, "b", Report(at, 10.0), THRESHOLD_MS)
    assert (standing.mode, standing.since) == ("synchronous", 2.0 + RECOVER_S)


def test_a_service_that_nobody_asks_any_more_is_tried_again() -> None:
    idle = [(t, "a", None) for t in range(1, 12)]
    assert after((0, "a", 500.0), *idle).mode == "synchronous"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1000)), max_size=200))
def test_it_never_flips_faster_than_it_may(reports: list[tuple[str, float]]) -> None:
    standing, at, back = Standing(), 0.0, []
    for replica, p95_ms in reports:
        at += 0.5
        found = decide(standing, replica, Report(at, p95_ms), THRESHOLD_MS)
        assert decide(standing, replica, Report(at, p95_ms), THRESHOLD_MS) == found
        if standing.mode == "deferred" and found.mode == "synchronous":
            back.append(at - standing.since)
        standing = found
    assert all(held_s >= RECOVER_S for held_s in back)


def test_a_percentile_of_few_says_nothing() -> None:
    seen = Latencies()
    for _ in range(SAMPLES_MIN - 1):
        seen.add(0.0, 900.0)
    assert seen.p95_ms(0.0) is None
    seen.add(0.0, 900.0)
    assert seen.p95_ms(0.0) == 900.0
    for _ in range(95):
        seen.add(1.0, 1.0)
    assert seen.p95_ms(1.0) == 1.0
    assert seen.p95_ms(1.0 + WINDOW_S) == 1.0
    assert seen.p95_ms(2.0 + WINDOW_S) is None


def test_a_service_that_answers_nobody_is_slow() -> None:
    seen = Latencies()
    assert seen.p95_ms(3.0, [3000.0] * SAMPLES_MIN) == 3000.0
    assert REPORT_S_MAX < WINDOW_S


def test_a_switch_is_made_known_by_who_made_it_or_by_another_should_that_be_dead() -> None:
    switched = decide(Standing(), "a", Report(100.0, 900.0), 200.0)
    assert switched.is_told_by(True, 100.0)
    assert not switched.is_told_by(False, 100.5)
    assert switched.is_told_by(False, 100.0 + REPORT_S_MAX + 0.1)
    told = replace(switched, told_since=switched.since)
    assert not told.is_told_by(False, 200.0)
    assert not Standing().is_told_by(False, 200.0), "nobody has switched yet"
