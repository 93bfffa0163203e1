"""The check of a reward function at registration: does it keep state between calls?

A few steps of its session's environment are scored twice: in their order, and in the opposite one
by the same code loaded afresh. A function of the transition alone gives the same rewards. Steps at
which it asks outside services are left out: nobody is asked at a desk.
"""

from __future__ import annotations

from dsec.client.check import played
from dsec.client.sealing import SealedSpec
from dsec.client.yaml_file import SpecFileError
from dsec.platform.copies import ending_copies
from dsec.platform.interposition import interposition_of
from dsec.reward.fact import ENV
from dsec.reward.score import FunctionScorer, RewardError, Scorer, load_scorer
from dsec.reward.state import changed, snapshot
from dsec.reward.transition import transition_of
from dsec.session.io import Stepped
from dsec.session.whole_episode import EpisodeStep, pack_episode
from dsec_contracts.canonical import encode

REWARD_STEPS = 16
EPISODE_CUT_STEPS = 4


def check_reward(reward: SealedSpec, env: SealedSpec, *, steps: int = REWARD_STEPS) -> int:
    """Score some steps of an environment twice. Returns how many could be compared.

    Raises:
        SpecFileError: the environment or the function cannot be used, or the rewards differ.
    """
    if reward.document.entry == ENV:
        return 0
    transitions = _transitions(env, steps)
    if reward.document.per == "episode":
        transitions = _episodes(transitions)
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
                f"reward {reward.name} keeps state between calls: {reward.document.per} {n} of "
                f"{len(transitions)}, scored in another order, has another reward{what}; it must "
                "depend on the transition and the responses of services alone"
            )
    return compared


def _episodes(steps: list[EpisodeStep]) -> list[EpisodeStep]:
    """What a function of whole episodes may be given: episodes, and beginnings of some, as
    `max_steps` cuts them."""
    found: list[EpisodeStep] = []
    episode: list[EpisodeStep] = []
    number = None
    for n, step in enumerate(steps, 1):
        known = transition_of(*step).episode
        if known != number:
            number, episode = known, []
        episode.append(step)
        if n % EPISODE_CUT_STEPS == 0 or n == len(steps):
            found.append(EpisodeStep(pack_episode(episode), b"", b""))
    return found


def _transitions(env: SealedSpec, steps: int) -> list[EpisodeStep]:
    found: list[EpisodeStep] = []
    prior = b""
    for output in played(env, steps):
        if isinstance(output, Stepped):
            found.append(EpisodeStep(output.fact, prior, output.observation))
            prior = output.reset_observation or output.observation
        else:
            prior = output.observation
    return found


def _scored(
    reward: SealedSpec, transitions: list[EpisodeStep]
) -> tuple[list[bytes | None], list[str]]:
    """Each reward's bytes, None where there is none; and what changed meanwhile."""
    try:
        with ending_copies():
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


def _body(scorer: Scorer, one: EpisodeStep) -> bytes | None:
    try:
        with ending_copies():
            return scorer.score(*one).body()
    except RewardError as error:
        # Failing at other steps in another order is state, too.
        return None if error.code == "service_unanswered" else encode(error.code)
