"""From a transition to its reward: reproducible bytes, and whatever a function may return."""

from __future__ import annotations

import math
import struct
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reward.conftest import ENV_SPEC, observation, spec_of, step_fact

import dsec
from dsec.platform import virtual
from dsec.reward import Transition
from dsec.reward.components import Components
from dsec.reward.fact import env_body, reward_body, reward_fact
from dsec.reward.score import RewardError, Score, Scorer, load_scorer
from dsec.reward.transition import step_fields, transition_of
from dsec.session.chance import current
from dsec.session.documents import RewardDocument, seal
from dsec_contracts import decode, encode

BEFORE, AFTER = observation(0), observation(1)
finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(min_size=1, max_size=8)


def scorer_of(body: str) -> Scorer:
    return load_scorer(*spec_of(body))


def score(body: str, fact: bytes | None = None) -> Score:
    return scorer_of(body).score(fact or step_fact(), BEFORE, AFTER)


def refusal(body: str) -> RewardError:
    with pytest.raises(RewardError) as caught:
        score(body)
    return caught.value


def returning(expression: str, weights: str = "") -> str:
    return f"@dsec.reward({weights})\ndef score(t, services):\n    return {expression}\n"


# -- the decorator


def test_the_package_is_the_decorator() -> None:
    @dsec.reward(weights={"a": 2})
    def function(t: Transition, services: object) -> float:
        return 0.0

    assert (vars(function)["weights"], vars(function)["per"]) == ({"a": 2.0}, "step")
    assert dsec.reward is sys.modules["dsec.reward"]


def test_a_function_scores_steps_or_episodes() -> None:
    assert dsec.reward(per="episode")(lambda episode, services: 0.0).per == "episode"
    with pytest.raises(ValueError, match=r'per must be "step" or "episode", not .day.'):
        dsec.reward(per="day")
    with pytest.raises(ValueError, match="an environment rewards each step"):
        RewardDocument(entry="env", per="episode")


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", True, None])
def test_a_weight_that_is_no_number_is_refused_by_name(weight: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="'a'"):
        dsec.reward(weights={"a": weight})


class _Turned(float):
    """Finite, until it is made plain."""

    def __float__(self) -> float:
        return math.nan


class _Text(str):
    __slots__ = ()


def test_what_is_declared_is_checked_as_what_is_kept() -> None:
    with pytest.raises(ValueError, match="weight 'a' is nan"):
        dsec.reward(weights={"a": _Turned(1.0)})
    declared: Any = dsec.reward(services=[_Text("stock")])(lambda t, services: 0.0)
    assert [type(name) for name in declared.services] == [str]


# -- values and bytes


def test_components_are_weighted() -> None:
    got = score(returning("{'b': 3, 'a': 0.25}", "weights={'a': 0.5, 'b': 2.0}"))
    assert got == Score(0.5 * 0.25 + 2.0 * 3, {"a": [0.25, 0.5], "b": [3.0, 2.0]})


def test_a_name_that_claims_to_equal_one_that_was_checked_is_refused() -> None:
    class Liar(str):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return hash("a")

    components = Components({})
    assert components.scores({"a": 1.0}) == {"a": 1.0}
    with pytest.raises(RewardError, match="name must be text, not Liar"):
        components.scores({Liar("b"): 1.0})


def test_without_weights_every_component_counts_one() -> None:
    assert score(returning("{'b': 1, 'a': 2}")) == Score(3.0, {"a": [2.0, 1.0], "b": [1.0, 1.0]})


def test_a_number_is_one_component() -> None:
    assert score(returning("t.env_reward")) == Score(1.0, {"reward": [1.0, 1.0]})
    assert score(returning("2", "weights={'only': 0.5}")) == Score(1.0, {"only": [2.0, 0.5]})


def test_an_async_function_is_driven() -> None:
    assert score("@dsec.reward()\nasync def score(t, services):\n    return 4\n").value == 4.0


@settings(max_examples=40)  # each loads a spec
@given(st.dictionaries(names, finite, min_size=1, max_size=6), st.randoms())
def test_the_order_in_which_components_are_returned_changes_nothing(
    scores: dict[str, float], random: Any
) -> None:
    shuffled = list(scores.items())
    random.shuffle(shuffled)
    found = []
    for items in (list(scores.items()), shuffled):
        try:
            found.append(score(returning(f"dict({items!r})")).body())
        except RewardError as error:
            found.append(error.message.encode())
    assert found[0] == found[1]


@given(
    st.integers(0, 2**31 - 1),
    st.integers(1, 3),
    st.floats(),
    st.dictionaries(names, st.lists(st.floats(), min_size=2, max_size=2), max_size=6),
    st.binary(min_size=16, max_size=16),
)
def test_a_fact_is_its_canonical_encoding(
    step: int, revision: int, value: float, components: dict[str, list[float]], cause: bytes
) -> None:
    expected = encode([step, revision, value, components, cause])
    assert reward_fact(step, revision, value, components, cause) == expected


@given(st.floats())
def test_the_environments_reward_is_recorded_exactly(value: float) -> None:
    expected = reward_body(value, {"env": [value, 1.0]})
    assert load_scorer(*ENV_SPEC).score(step_fact(env_reward=value), None, None).body() == expected
    assert env_body(struct.pack("<d", value)) == expected


def test_zero_and_minus_zero_stay_apart() -> None:
    assert env_body(struct.pack("<d", 0.0)) != env_body(struct.pack("<d", -0.0))


def test_env_needs_no_prior_and_functions_do() -> None:
    assert not load_scorer(*ENV_SPEC).needs_prior
    assert scorer_of(returning("1")).needs_prior


# -- what a function sees

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=40),
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(st.text(max_size=3), v, max_size=3)
        | v.map(lambda x: (x,))
    ),
    max_leaves=6,
)
arrays = st.builds(
    lambda dtype, shape, start: (np.arange(math.prod(shape)) + start).astype(dtype).reshape(shape),
    st.sampled_from(["<f4", "<f8", "u1", "<i8", ">f4", "?", "<c8", "<U3"]),
    st.sampled_from([(), (4,), (2, 3), (0,), (3, 2)]),
    st.integers(0, 9),
)


@given(values | arrays, values, values | arrays, st.integers(0, 2**40), st.floats(), values)
def test_the_fast_way_sees_what_the_strict_way_sees(
    action: Any, info: Any, seen: Any, step: int, reward: float, calls: Any
) -> None:
    fact = encode(
        [
            step,
            3,
            [["reward", 1, b"x" * 16]],
            calls,
            action,
            None,
            reward,
            True,
            False,
            info,
            b"s" * 16,
            b"o" * 16,
            None,
        ]
    )
    raw = encode(seen)
    for _ in range(2):  # the second time from memory
        t = transition_of(fact, raw, b"")
        fields = step_fields(fact)
        chosen = [t.action, None] if t.action_params is None else [t.action, t.action_params]
        if type(fields[4]) is dict and fields[4].keys() == {"action", "action_params"}:
            expected = [fields[4]["action"], fields[4]["action_params"]]
        else:
            expected = [fields[4], None]
        assert encode(chosen) == encode(expected)
        assert encode(
            [t.step, t.episode, t.env_reward, t.terminated, t.truncated, t.info]
        ) == encode([step, 3, fields[6], True, False, fields[9]])
        assert encode(t.observation) == encode(decode(raw))
        assert t.next_observation is None
        if isinstance(t.observation, np.ndarray):
            assert t.observation.flags.writeable
            assert t.observation.dtype == decode(raw).dtype


def test_action_params_are_apart() -> None:
    fact = step_fact(action={"action": 1, "action_params": {"price": 2.5}})
    got = score(returning("t.action + t.action_params['price']"), fact)
    assert got.value == 3.5


@pytest.mark.parametrize("cut", range(0, len(step_fact()), 7))
def test_bytes_that_are_no_step(cut: int) -> None:
    fact = step_fact()[:cut]
    for scorer in (load_scorer(*ENV_SPEC), scorer_of(returning("1"))):
        with pytest.raises(RewardError) as caught:
            scorer.score(fact, BEFORE, AFTER)
        assert caught.value.code == "step_malformed"


MUTATES = """
@dsec.reward()
def score(t, services):
    seen = {
        "before": float(t.observation[0]),
        "after": float(t.next_observation[0]),
        "action": float(t.action[0]),
        "info": len(t.info["list"]),
    }
    t.observation.fill(9)
    t.next_observation.fill(9)
    t.action.fill(5)
    t.info["list"].append(1)
    return seen
"""


def test_what_a_function_does_to_its_arguments_reaches_nobody() -> None:
    scorer = scorer_of(MUTATES)
    fact = step_fact(action=np.zeros(2, np.float32), info={"list": []})
    first, second = (scorer.score(fact, BEFORE, AFTER) for _ in range(2))
    assert first == second
    assert observation(0) == BEFORE
    with pytest.raises(RewardError, match="FrozenInstanceError"):
        score("def score(t, services):\n    t.step = 9\n    return 1\n")


def test_chance_is_the_steps_own() -> None:
    body = returning("random.random() + uuid.uuid4().int % 7 + time.time() % 1").replace(
        "@dsec", "import random, time, uuid\n@dsec"
    )
    virtual.install()
    try:
        scorer = scorer_of(body)
        one, two = step_fact(1), step_fact(2)
        first = [scorer.score(fact, BEFORE, AFTER).value for fact in (one, two)]
        again = [scorer.score(fact, BEFORE, AFTER).value for fact in (two, one)]
    finally:
        virtual.uninstall()
    assert first == again[::-1]
    assert first[0] != first[1]
    assert current() is None


# -- what is refused


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (returning("{'a': float('nan'), 'b': 1}"), "reward_invalid", "component 'a' is nan"),
        (returning("{'b': 1, 'a': float('-inf')}"), "reward_invalid", "component 'a' is -inf"),
        (
            returning("{'A': 1, 'b': 1}", "weights={'a': 1, 'b': 1}"),
            "reward_invalid",
            "component 'A' has no declared weight; 'a', 'b' have one",
        ),
        (returning("{'a': None}"), "reward_invalid", "component 'a' is no number but NoneType"),
        (returning("None"), "reward_invalid", "the reward is no number but NoneType"),
        (returning("'3'"), "reward_invalid", "no number but str"),
        (returning("[1.0]"), "reward_invalid", "no number but list"),
        (returning("t.observation"), "reward_invalid", "no number but ndarray"),
        (returning("{}"), "reward_invalid", "no component"),
        (returning("{1: 1.0}"), "reward_invalid", "must be text, not int"),
        (returning("{'a': 10 ** 400}"), "reward_invalid", "too large"),
        (returning("{'a': 1e308, 'b': 1e308}"), "reward_invalid", "total is inf"),
        (returning("{'x': 1}", "weights={'a': 1}"), "reward_invalid", "component 'x' has no"),
        (returning("{'a': 1}", "weights={'a': 1, 'b': 1}"), "reward_invalid", "'b' was not"),
        (returning("1", "weights={'a': 1, 'b': 1}"), "reward_invalid", "mapping of a, b"),
        (returning("{str(n): 1 for n in range(65)}"), "reward_invalid", "65 components"),
        (returning("1 / 0"), "reward_raised", "ZeroDivisionError"),
        (returning("exit(0)").replace("@", "import sys\n@"), "reward_raised", "SystemExit"),
        (returning("services['scores']"), "service_not_declared", "declares no service 'scores'"),
        (
            returning("services.get('scores', 1)"),
            "service_not_declared",
            "declares no service 'scores'",
        ),
        (
            "class Bad:\n    def __float__(self):\n        raise KeyboardInterrupt\n"
            "def score(t, services):\n    return Bad()\n",
            "reward_raised",
            "KeyboardInterrupt",
        ),
        (
            "class Yes:\n    def __await__(self):\n        yield\n"
            "async def score(t, services):\n    await Yes()\n",
            "reward_invalid",
            "awaited",
        ),
        # What is ours, raised by the function: its class says nothing.
        (
            "from dsec.reward.score import RewardError\n"
            "def score(t, services):\n    raise RewardError('step_malformed', 'mine')\n",
            "reward_raised",
            "mine",
        ),
        (
            "class Odd(Exception):\n    @property\n    def __notes__(self):\n        exit(3)\n"
            "def score(t, services):\n    raise Odd\n",
            "reward_raised",
            "Odd, which raises when it is told",
        ),
        ("def other(t, services): ...\n", "reward_load_failed", "has no 'score'"),
        ("raise SystemExit\n", "reward_load_failed", "SystemExit"),
        ("score = 3\n", "reward_load_failed", "is no function"),
        ("def score(\n", "reward_load_failed", "SyntaxError"),
    ],
)
def test_what_is_no_reward(body: str, code: str, told: str) -> None:
    error = refusal(body)
    assert error.code == code
    assert told in error.message


@pytest.mark.parametrize("content", [b"", b"\xa0", encode({"kind": "env"}), encode([1])])
def test_bytes_that_are_no_spec(content: bytes) -> None:
    with pytest.raises(RewardError) as caught:
        load_scorer("0" * 64, content)
    assert caught.value.code == "reward_load_failed"


def test_a_documents_weights_come_before_the_functions() -> None:
    document = RewardDocument(entry="reward.py:score", weights={"a": 3.0})
    source = b"import dsec\n@dsec.reward(weights={'a': 1})\ndef score(t, s):\n    return {'a': 2}\n"
    scorer = load_scorer(*seal("reward", document, {"reward.py": source}))
    assert scorer.score(step_fact(), None, None).value == 6.0


# -- NaN and infinities that are meant


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_not_finite_is_recorded_exactly_where_that_is_meant(value: str) -> None:
    body = returning(f"{{'a': float('{value}'), 'b': 1}}", "nonfinite=True")
    found = score(body)
    assert encode(found.components["a"]) == encode([float(value), 1.0])
    assert encode(found.value) == encode(float(value))
    assert encode(float(value)) in found.body()
    document = RewardDocument(entry="reward.py:score", nonfinite=True)
    source = ("import dsec\n" + returning(f"float('{value}')")).encode()
    spec = seal("reward", document, {"reward.py": source})
    assert encode(load_scorer(*spec).score(step_fact(), BEFORE, AFTER).value) == encode(
        float(value)
    )
    error = refusal(returning(f"{{'a': float('{value}'), 'b': 1}}"))
    assert "component 'a'" in error.message
    assert "nonfinite" in error.message


def test_a_spec_that_uses_no_new_key_keeps_its_name() -> None:
    assert RewardDocument(entry="reward.py:score").model_dump() == {
        "entry": "reward.py:score",
        "code": ["*.py"],
        "weights": {},
        "per": "step",
    }


@pytest.mark.parametrize("services", ["stock", ["a b"], [3], ["x"] * 33, 7])
def test_services_that_are_refused(services: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="services"):
        dsec.reward(services=services)
