"""The fold: pure, total, indifferent to order and repetition, and it finds a false chain."""

import math
import random
import time
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.session.shuffled import run_shuffled

from dsec.replay.fold import DeferredReward, Fault, StepNotRecorded, fold, fold_at
from dsec.session.io import SessionConfig
from dsec.session.log_row import RecordedGap
from dsec_contracts.canonical import decode, encode

SESSION_ID = UUID("0192f0c1-2345-7abc-8def-0123456789ab")


def test_a_state_is_what_the_log_says(rows):
    state = fold(rows)
    steps = [r for r in rows if r.kind == "session.stepped"]
    rewards = [r.value for r in rows if r.kind == "reward.scored"]
    total = 0.0
    for reward in rewards:
        total += reward
    assert (state.status, state.code, state.steps) == ("completed", "max_steps", 40)
    assert state.reward_total == total
    assert state.rewards == 40
    assert state.chain == rows[-1].chain
    assert state.chain_hash == rows[-1].chain.hex()
    assert (
        state.episodes
        == sum(r.terminated or r.truncated for r in steps)
        == len([e for e in state.by_episode if e.finished])
    )
    assert math.isclose(sum(state.returns), total)
    assert state.observation == steps[-1].observation
    assert state.intact


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_order_and_repetition_change_nothing(rows, data):
    repeated = data.draw(st.lists(st.sampled_from(rows), max_size=40))
    shuffled = data.draw(st.permutations(rows + repeated))
    step = data.draw(st.integers(0, 39))
    assert fold(shuffled) == fold(rows)
    assert fold_at(shuffled, step) == fold_at(rows, step)


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 200))
def test_every_prefix_has_a_state(rows, cut):
    state = fold(rows[:cut])
    assert state.steps == sum(r.kind == "session.stepped" for r in rows[:cut])
    assert state.intact
    assert state.status == ("queued" if not cut else "running" if cut < len(rows) else "completed")


def test_a_deferred_reward_is_at_its_step_with_when_it_was_delivered(cartpole):
    config = SessionConfig(7, 12, reward_lag_steps_max=4)
    rows = run_shuffled(
        cartpole.program, config, SESSION_ID, cartpole.scorer, random.Random(3), deferred_share=0.6
    )
    outputs = [r for r in rows if r.kind in ("session.stepped", "session.ended")]
    at = {row.key: n for n, row in enumerate(rows)}
    expected = []
    for row in rows:
        if row.kind == "reward.deferred":
            came = at[f"reward:{row.step}.1"]
            before = next(n for n, output in enumerate(outputs) if at[output.key] > came)
            expected.append(DeferredReward(row.step, "service_slow", before))
    state = fold(rows)
    assert state.deferred == sorted(expected, key=lambda one: one.step)
    assert {one.delivered_before - one.step for one in state.deferred} >= {1, 2, 4}
    assert state.rewards == 12
    random.Random(1).shuffle(rows)
    assert fold(rows + rows[:9]) == state
    first = state.deferred[0]
    assert fold_at(rows, first.step).deferred == [DeferredReward(first.step, "service_slow", None)]


def test_the_state_at_a_step_is_that_of_the_log_cut_there(rows):
    for step in range(40):
        at = fold_at(rows, step)
        cut = [r for r in rows if r.step is None or r.step <= step]
        assert at == fold([r for r in cut if r.kind != "session.ended"])
        assert (at.steps, at.status, at.ended) == (step + 1, "running", None)
    with pytest.raises(StepNotRecorded, match="its last one is 39"):
        fold_at(rows, 40)


def test_a_gap_is_an_error(rows):
    with pytest.raises(RecordedGap) as caught:
        fold([r for r in rows if r.key != "step:7"])
    assert caught.value.step == 7
    with pytest.raises(RecordedGap) as caught:
        fold([r for r in rows if r.key != "step:39"])
    assert caught.value.step == 39
    with pytest.raises(RecordedGap):
        fold_at([r for r in rows if r.key != "step:7"], 20)
    assert fold_at([r for r in rows if r.key != "step:7"], 6).steps == 7


def test_an_empty_log_and_one_without_steps_have_states():
    assert fold([]).status == "queued"
    assert fold([]).reward_total is None


def changed(row, **fields):
    fact = decode(row.fact)
    if isinstance(fact, dict):
        fact.update(fields)
    else:
        for n, value in fields.items():
            fact[int(n[1:])] = value
    return row._replace(fact=encode(fact))


@pytest.mark.parametrize("n", range(13))
@pytest.mark.parametrize("step", [0, 17, 39])
def test_a_changed_fact_breaks_the_chain_there(rows, n, step):
    false = [changed(r, **{f"f{n}": "other"}) if r.key == f"step:{step}" else r for r in rows]
    state = fold(false)
    assert state.fault == Fault(step, "chain")
    assert not state.intact
    assert state.steps == 40


def test_a_changed_start_or_end_is_told(rows):
    def fault(key, **fields):
        return fold([changed(r, **fields) if r.key == key else r for r in rows]).fault

    assert fault("started", reset="oMDA") == Fault(None, "chain_0")
    assert fault("started", chain="AAAA") == Fault(None, "chain_0")
    assert fault("started", reset=3) == Fault(None, "chain_0")
    assert fault("ended", code="oom") == Fault(None, "chain")
    assert fault("ended", steps=3) == Fault(None, "steps")
    assert fault("ended", episodes=99) == Fault(None, "episodes")
    assert fault("ended", chain="AAAA") == Fault(None, "chain")
    assert fault("ended", steps=None) == Fault(None, "ended")
    broken = [r._replace(fact=b"\xff") if r.key == "ended" else r for r in rows]
    assert fold(broken).fault == Fault(None, "ended")
    assert fold([r for r in rows if r.key != "started"]).fault == Fault(None, "started")


def reward(row, revision, value, sequence=1000):
    key = f"reward:{row.step}.{revision}"
    return row._replace(key=key, value=value, sequence=sequence)


def test_the_highest_revision_counts_in_whatever_order_it_comes(rows):
    first = next(r for r in rows if r.key == "reward:3.1")
    base = fold(rows).reward_total
    second, tenth = reward(first, 2, 100.0), reward(first, 10, 5.0)
    for extra in ([second, tenth], [tenth, second]):
        for log in (rows + extra, extra + rows):
            assert math.isclose(fold(log).reward_total, base - first.value + 5.0)
            assert fold(log).rewards == 40


def test_of_two_facts_under_one_key_the_lower_position_counts(rows):
    by_key = {r.key: r for r in rows}
    for late in (
        by_key["reward:3.1"]._replace(value=9.0, sequence=1000),
        by_key["step:3"]._replace(chain=b"x", sequence=1000),
        by_key["started"]._replace(fact=b"", sequence=1000),
        by_key["ended"]._replace(fact=b"", sequence=1000),
    ):
        assert fold([late, *rows]) == fold([*rows, late]) == fold(rows)


def test_a_missing_reward_is_counted_and_not_zero(made):
    source = "def reward(t, services):\n    assert t.step % 3\n    return float(t.step)\n"
    log = made(reward=source).rows(max_steps=10)
    state = fold(log)
    assert (state.rewards, state.rewards_missing) == (6, 4)
    assert state.reward_total == 1 + 2 + 4 + 5 + 7 + 8
    assert [e.missing for e in state.by_episode] == [4]
    later = reward(next(r for r in log if r.key == "reward:1.1"), 2, 50.0)
    later = later._replace(step=3, key="reward:3.2")
    state = fold([*log, later])
    assert (state.rewards, state.rewards_missing, state.reward_total) == (7, 3, 77)


def test_a_log_without_rewards_has_no_total(rows):
    state = fold([r for r in rows if r.kind != "reward.scored"])
    assert (state.reward_total, state.rewards, state.rewards_missing) == (None, 0, 0)


def test_attempts_are_placements_before_the_step(rows):
    placed = rows[0]._replace(kind="session.placed", key="placed:1", attempt=1, sequence=0)
    again = placed._replace(key="placed:2", attempt=2, sequence=rows[20].sequence, index=1)
    log = [*rows, again, placed]
    assert fold(log).attempts == 2
    assert fold_at(log, 2).attempts == 1
    assert fold([placed]).status == "running"


def test_not_a_number_and_infinities_are_summed_as_numbers(rows):
    odd = [r._replace(value=math.inf) if r.key == "reward:3.1" else r for r in rows]
    assert fold(odd).reward_total == math.inf
    odd = [r._replace(value=-math.inf) if r.key == "reward:5.1" else r for r in odd]
    assert math.isnan(fold(odd).reward_total)


def test_a_row_costs_microseconds(rows):
    """The bound is loose on purpose; `loadtests/replay.py` measures."""
    many = []
    steps = [r for r in rows if r.kind == "session.stepped"]
    scores = [r for r in rows if r.kind == "reward.scored"]
    for n in range(4000):
        many += [
            steps[n % 40]._replace(step=n, key=f"step:{n}"),
            scores[n % 40]._replace(step=n, key=f"reward:{n}.1"),
        ]
    best = math.inf
    for _ in range(3):
        began = time.process_time()  # others may have the core meanwhile
        fold(many)
        best = min(best, time.process_time() - began)
    assert best / len(many) < 20e-6
