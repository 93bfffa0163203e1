"""A budget holds in any window, whoever comes and goes; in virtual time."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.platform.budget import (
    AHEAD_S,
    BATCH_S,
    CLOCK_S_MAX,
    CLOSED_S_MAX,
    OVER_MAX,
    VALID_S,
    WINDOW_S,
    Ledger,
    close,
    is_usable,
    reserve,
    spacing_s,
)

SECONDS = 60.0


def play(
    qps: float, seed: int, lives: list[tuple[float, float]], skew_s: float = 0.0
) -> list[float]:
    """The times at which replicas that always have work send, late by up to what is allowed.

    Args:
        lives: when each replica begins and is killed.
    """
    chance = random.Random(seed)
    ledger, sent = Ledger(), []
    skews = [chance.uniform(0, skew_s) for _ in lives]
    due = [(begin, n) for n, (begin, _) in enumerate(lives)]
    heapq.heapify(due)
    while due:
        now, n = heapq.heappop(due)
        killed = lives[n][1]
        if now >= min(SECONDS, killed):
            continue
        grant = reserve(ledger, now + skews[n], qps, chance.randint(1, 500))
        ledger = grant.ledger
        for instant in grant.instants:
            at = instant - skews[n] + chance.uniform(0, VALID_S)
            if at < killed and is_usable(instant, at + skews[n]):
                sent.append(at)
        again = (
            grant.instants[-1] - skews[n] - AHEAD_S / 2 if grant.instants else now + grant.wait_s
        )
        heapq.heappush(due, (max(again, now + 0.001) + chance.uniform(0, 0.01), n))
    return sorted(sent)


def most_in_a_window(sent: list[float]) -> int:
    return max(bisect_left(sent, at + WINDOW_S) - n for n, at in enumerate(sent))


@given(
    st.floats(0.1, 400),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.floats(0, 30), st.floats(1, 90)), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_no_window_is_above_the_budget_whoever_comes_and_is_killed(
    qps: float, seed: int, others: list[tuple[float, float]]
) -> None:
    sent = play(qps, seed, [(0.0, SECONDS), *others])
    assert most_in_a_window(sent) <= max(1, OVER_MAX * qps * WINDOW_S)


@pytest.mark.parametrize("qps", [0.5, 1, 3, 7, 20, 150])
@pytest.mark.parametrize("lives", [[(0, 99)], [(0, 99)] * 2, [(0, 99), (0, 21.3), (35.0, 99)]])
def test_nine_tenths_are_used_while_there_is_work(
    qps: float, lives: list[tuple[float, float]]
) -> None:
    sent = play(qps, 7, lives)
    used = len([at for at in sent if at < SECONDS - AHEAD_S])
    assert used >= 0.9 * qps * (SECONDS - AHEAD_S - VALID_S) - 1
    assert most_in_a_window(sent) <= OVER_MAX * qps * WINDOW_S


def test_clocks_that_differ_change_no_rate() -> None:
    sent = play(20, 3, [(0, 99), (0, 99), (0, 99)], skew_s=1.0)
    steady = [at for at in sent if at > 3]
    assert most_in_a_window(steady) <= OVER_MAX * 200 + 20 * 1.0
    assert len(steady) >= 0.9 * 20 * (SECONDS - 3 - 2)


def test_a_pause_leaves_nothing_to_catch_up_with() -> None:
    ledger = reserve(Ledger(), 1000.0, 20, 5).ledger
    grant = reserve(ledger, 2000.0, 20, 500)
    assert grant.instants[0] == 2000.0
    assert len(grant.instants) == 5  # a quarter of a second


def test_what_is_reserved_is_bounded() -> None:
    grant = reserve(Ledger(), 0.0, 400, 100_000)
    assert len(grant.instants) <= BATCH_S * 400
    assert reserve(grant.ledger, 0.0, 400, 0).instants  # at least one: somebody asks
    full = Ledger(next_at=AHEAD_S + 0.1)
    assert reserve(full, 0.0, 400, 1).instants == ()
    assert reserve(full, 0.0, 400, 1).wait_s == pytest.approx(0.1)


@pytest.mark.parametrize("qps", [20, 50, 400])
def test_a_replica_that_always_has_work_asks_a_few_times_a_second(qps: float) -> None:
    ledger, now, asked = Ledger(), 0.0, 0
    while now < SECONDS:
        grant = reserve(ledger, now, qps, 1000)
        ledger, asked = grant.ledger, asked + 1
        now += grant.wait_s + 0.0001
    assert asked <= 3 * SECONDS / BATCH_S


def test_a_clock_that_is_an_hour_ahead_stops_nobody() -> None:
    wrong = reserve(Ledger(), 3600.0, 20, 5).ledger
    assert reserve(wrong, 0.0, 20, 1).instants == (AHEAD_S,)
    assert reserve(close(Ledger(), 3600.0, 60), 0.0, 20, 1).instants == (0.0,)


def test_a_service_that_asks_to_be_left_alone_is_left_alone_by_all() -> None:
    ledger = close(reserve(Ledger(), 0.0, 20, 5).ledger, 0.0, 2.0)
    assert reserve(ledger, 0.5, 20, 1).instants == ()
    assert reserve(ledger, 1.6, 20, 1).instants == (2.0,)
    assert close(ledger, 0.5, 0.1).closed_until == 2.0
    long = close(ledger, 0.0, 86_400)
    assert long.closed_until == CLOSED_S_MAX
    assert reserve(long, CLOSED_S_MAX + CLOCK_S_MAX, 20, 1).instants


def test_an_instant_is_used_in_time_or_not_at_all() -> None:
    assert is_usable(10.0, 10.0 + VALID_S)
    assert not is_usable(10.0, 10.01 + VALID_S)
    assert spacing_s(1) * 10 >= WINDOW_S + VALID_S
    assert spacing_s(100) == 0.01
