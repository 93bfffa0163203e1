"""The audit of provenance: every count by hand, and counts that add up over sessions."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.evaluator.audit import Audit, UnknownCall, audit
from dsec.evaluator.handlers import sanity_fact
from dsec.session.log_row import LogRow
from dsec_contracts.canonical import encode
from dsec_contracts.evaluation import UNKNOWN_CALLS_MAX, PolicySanityFact

SESSION = UUID("01a22b73-29d2-725d-8e5a-7d7fb9de0398")


def step(n: int, provenance: Any) -> LogRow:
    """A step and what its agent said."""
    extras = encode({"provenance": provenance})
    return LogRow(SESSION, f"step:{n}", "session.stepped", 1, 1, n, 0, step=n, extras=extras)


def reward(n: int, value: float, revision: int = 1) -> LogRow:
    """A reward of a step."""
    key = f"reward:{n}.{revision}"
    return LogRow(SESSION, key, "reward.scored", 1, 1, n, 1, step=n, value=value)


def called(n: int, turn: int, *ids: str) -> LogRow:
    """A turn of tool calls."""
    fact = encode({"step": n, "turn": turn, "calls": [{"id": one} for one in ids]})
    return LogRow(SESSION, f"tool_call:{n}.{turn}", "tool.called", 1, 1, n, 0, fact=fact)


def test_an_agent_that_says_nothing_and_calls_nothing_is_passed_over() -> None:
    found = audit(9, [reward(0, 1.0)])
    assert found.says_nothing
    assert found.ok
    assert found.steps == 9
    assert found.calibration_error is None
    assert found.correlation is None


def test_calls_count_where_a_step_names_them_once_they_have_happened() -> None:
    rows = [
        called(1, 0, "call_1_0_0", "call_1_0_1"),
        called(4, 0, "call_4_0_0"),
        step(0, {"tool_call_id": "call_1_0_0"}),  # not yet
        step(1, {"tool_call_id": "call_1_0_0"}),
        step(2, {"tool_call_id": ["call_1_0_0", "call_9_0_0", 7]}),
        step(3, {"reasoning": "none"}),
    ]
    found = audit(5, rows)
    assert (found.steps, found.with_provenance, found.tool_calls) == (5, 4, 3)
    assert found.unknown_calls == [
        UnknownCall(0, "call_1_0_0"),
        UnknownCall(2, "call_9_0_0"),
        UnknownCall(2, "7"),
    ]
    assert found.unknown_calls_total == 3
    assert not found.ok
    assert found.tool_calls_without_provenance == 2


@pytest.mark.parametrize(
    "provenance",
    ["because", 3, {"confidence": 1.5}, {"confidence": "high"}, {"confidence": float("nan")},
     {"confidence": True}, {"confidence": 10**400}, {"confidence": np.array([0.5, 0.6])},
     {"confidence": np.complex64(0.5)}],
)  # fmt: skip
def test_what_is_no_provenance_is_counted_and_ends_nothing(provenance: Any) -> None:
    found = audit(1, [step(0, provenance), reward(0, 1.0)])
    assert found.provenance_malformed == 1
    assert sum(found.confident) == 0
    assert not found.ok
    assert not found.says_nothing


def test_any_text_that_is_taken_for_the_id_of_a_call_can_be_published() -> None:
    found = audit(1, [step(0, {"tool_call_id": ["\ud800x", "a\0b", {"n": [1]}]})])
    assert found.unknown_calls_total == 3
    fact = sanity_fact(SESSION, "a" * 64, found)
    assert [call.tool_call_id for call in fact.unknown_calls] == ["?x", "a\0b", "{'n': [1]}"]


def test_calibration_by_hand() -> None:
    rows = [
        step(0, {"confidence": 0.25}), reward(0, 0.0),
        step(1, {"confidence": 0.85}), reward(1, 1.0),
        step(2, {"confidence": np.float32(1.0)}), reward(2, 1.0),
        step(3, {"confidence": 0.5}),  # no reward came
        step(4, {"confidence": 0.5}), reward(4, float("nan")),
    ]  # fmt: skip
    found = audit(5, rows)
    assert found.confident == [0, 0, 1, 0, 0, 0, 0, 0, 1, 1]
    assert found.calibration_error == pytest.approx((0.25 + 0.15 + 0.0) / 3)
    expected = np.corrcoef([0.25, 0.85, 1.0], [0.0, 1.0, 1.0])[0, 1]
    assert found.correlation == pytest.approx(expected)


def test_rewards_beyond_0_to_1_have_no_calibration_and_constant_ones_no_correlation() -> None:
    rows = [step(n, {"confidence": 0.1 * n}) for n in range(5)]
    found = audit(5, [*rows, *(reward(n, 7.0) for n in range(5))])
    assert found.calibration_error is None
    assert found.correlation is None


def test_rewards_of_any_size_have_their_correlation_or_none() -> None:
    for size, expected in ((1.0, -0.866025), (1e150, -0.866025), (1e200, None)):
        found = Audit()
        for confidence, value in ((0.1, size), (0.9, -size), (0.5, size)):
            found.rewarded(confidence, value)
        assert found.correlation == (None if expected is None else pytest.approx(expected)), size
        fact = sanity_fact(SESSION, "0" * 64, found)
        assert PolicySanityFact.model_validate_json(fact.model_dump_json()) == fact


def test_a_revised_reward_changes_nothing() -> None:
    rows = [step(0, {"confidence": 0.5}), reward(0, 0.25)]
    assert audit(1, rows) == audit(1, [reward(0, 0.75, revision=2), *rows])


def test_an_agent_with_provenance_owes_it_for_all_of_its_calls() -> None:
    silent = [called(0, 0, "call_0_0_0")]
    assert audit(1, silent).ok
    assert not audit(1, [*silent, step(0, {"reasoning": "none"})]).ok


def test_a_flood_is_counted_whole_and_listed_to_a_bound() -> None:
    rows = [step(n, {"tool_call_id": "x" * 10_000}) for n in range(100)]
    found = audit(100, rows)
    assert found.unknown_calls_total == 100
    assert len(found.unknown_calls) == UNKNOWN_CALLS_MAX
    fact = sanity_fact(SESSION, "0" * 64, found)
    assert len(fact.unknown_calls) == UNKNOWN_CALLS_MAX


steps = st.lists(
    st.tuples(st.floats(0, 1), st.floats(-1e3, 1e3) | st.none(), st.sampled_from("abc")),
    max_size=8,
)


@given(steps, steps, st.randoms())
def test_order_changes_nothing_and_sessions_add_up(one: Any, other: Any, random: Any) -> None:
    def rows_of(session: Any, first: int) -> list[LogRow]:
        rows = [called(first, 0, "a")]
        for n, (confidence, value, named) in enumerate(session, first):
            rows.append(step(n, {"confidence": confidence, "tool_call_id": named}))
            if value is not None:
                rows.append(reward(n, value))
        return rows

    rows = rows_of(one, 0)
    shuffled = list(rows)
    random.shuffle(shuffled)
    found = audit(len(one), rows)
    assert audit(len(one), shuffled) == found

    total = Audit()
    total.add(found)
    total.add(audit(len(other), rows_of(other, 100)))
    assert total.steps == len(one) + len(other)
    assert sum(total.confident) == sum(v is not None for _, v, _ in [*one, *other])
    assert total.with_provenance == total.steps
    if total.correlation is not None:
        pairs = [(c, v) for c, v, _ in [*one, *other] if v is not None]
        assert total.correlation == pytest.approx(
            np.corrcoef(*zip(*pairs, strict=True))[0, 1], abs=1e-6
        )
