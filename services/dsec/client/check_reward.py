"""The check of a reward function at registration: does it keep state between calls?

A few steps of its session's environment are scored twice: in their order, and in the opposite one
by the same code loaded afresh. A function of the transition alone gives the same rewards. Steps at
which it asks outside services are left out: nobody is asked at a desk.
"""

from __future__ import annotations

from typing import NamedTuple

from dsec.client.check import played
from dsec.client.sealing import SealedSpec
from dsec.client.yaml_file import SpecFileError
from dsec.platform.interposition import interposition_of
from dsec.reward.fact import ENV
from dsec.reward.score import FunctionScorer, RewardError, Scorer, load_scorer
from dsec.reward.state import changed, snapshot
from dsec.session.io import Stepped
from dsec_contracts.canonical import encode

REWARD_STEPS = 16


class _Transition(NamedTuple):
    fact: bytes
    observation: bytes
    next_observation: bytes


def check_reward(reward: SealedSpec, env: SealedSpec, *, steps: int = REWARD_STEPS) -> int:
    """Score some steps of an environment twice. Returns how many could be compared.

    Raises:
        SpecFileError: the environment or the function cannot be used, or the rewards differ.
    """
    if reward.document.entry == ENV:
        return 0
    transitions = _transitions(env, steps)
    first, told = _scored(reward, transitions)
    backwards, told_too = _scored(reward, transitions[::-1])
    again = backwards[::-1]
    compared = 0
    for n, (one, other) in enumerate(zip(first, again, strict=True)):
        if one is None or other is None:
            continue
        compared += 1
        if one != other:
            what = ", ".join(told or told_too)
            what = f" (what changed between calls: {what})" if what else ""
            raise SpecFileError(
                f"reward {reward.name} keeps state between calls: step {n} of "
                f"{len(transitions)}, scored in another order, has another reward{what}; it must "
                "depend on the transition and the responses of services alone"
            )
    return compared


def _transitions(env: SealedSpec, steps: int) -> list[_Transition]:
    found: list[_Transition] = []
    prior = b""
    for output in played(env, steps):
        if isinstance(output, Stepped):
            found.append(_Transition(output.fact, prior, output.observation))
            prior = output.reset_observation or output.observation
        else:
            prior = output.observation
    return found


def _scored(
    reward: SealedSpec, transitions: list[_Transition]
) -> tuple[list[bytes | None], list[str]]:
    """Each reward's bytes, None where there is none; and what changed meanwhile."""
    try:
        scorer = load_scorer(reward.spec_hash, reward.content, interposition_of)
    except RewardError as error:
        raise SpecFileError(f"reward {reward.name}: {error.message}") from error
    try:
        if not isinstance(scorer, FunctionScorer):
            return [_body(scorer, one) for one in transitions], []
        before = snapshot(scorer.function, scorer.namespace)
        bodies = [_body(scorer, one) for one in transitions]
        return bodies, changed(before, snapshot(scorer.function, scorer.namespace))
    finally:
        scorer.unload()


def _body(scorer: Scorer, one: _Transition) -> bytes | None:
    try:
        return scorer.score(*one).body()
    except RewardError as error:
        # Failing at other steps in another order is state, too.
        return None if error.code == "service_unanswered" else encode(error.code)
