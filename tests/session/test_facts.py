"""Facts that are put together are those that the encoder gives."""

from __future__ import annotations

import pytest

from dsec.session.chain import digest16
from dsec.session.facts import NULL, listed, reset_fact, step_fact
from dsec_contracts.canonical import decode, encode

STATE = bytes(range(16))
OBSERVATION = encode([1, 2.5])


@pytest.mark.parametrize("reward", [0.0, -0.0, 1e16, float("inf"), 0.1])
@pytest.mark.parametrize("step", [0, 23, 24, 255, 256, 70_000])
def test_a_step_is_the_canonical_list_of_its_fields(step: int, reward: float) -> None:
    named = [["reward", step, b"0" * 16], ["cancel", 0, b"1" * 16]]
    info, reset = {"a": [1]}, [STATE, digest16(OBSERVATION), {}]
    inputs = listed([encode(one) for one in named])
    fact = step_fact(
        step,
        3,
        inputs,
        listed([]),
        encode({"x": 1}),
        reward,
        True,
        False,
        encode(info),
        STATE,
        OBSERVATION,
        reset_fact(STATE, OBSERVATION, encode({})),
    )
    hashes = [STATE, digest16(OBSERVATION)]
    whole = [step, 3, named, [], {"x": 1}, None, reward, True, False, info, *hashes, reset]
    assert fact == encode(whole)


def test_no_number_as_a_reward_has_one_form() -> None:
    parts = (b"\x80", b"\x80", b"\x01")
    rest = (False, True, b"\xa0", STATE, OBSERVATION, NULL)
    fact = step_fact(0, 0, *parts, -float("nan"), *rest)
    assert fact == step_fact(0, 0, *parts, float("nan"), *rest)
    value = decode(fact)[6]
    assert value != value
