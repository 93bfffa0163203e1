"""From one recorded transition to its reward. No clock, no entropy, no I/O.

The reward service and the replay use the same code, so a reward that is computed anew has the same
bytes. A function runs under a `Chance` that is derived from the step's fact alone: whoever scores
the step, when, and after which others, it draws the same.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, Final

from dsec.reward.components import Components, RewardError, Score
from dsec.reward.declaration import check_services, check_weights
from dsec.reward.fact import ENV, reward_fact
from dsec.reward.reexecution import Asks, read_recorded, run
from dsec.reward.services import NoServiceDeclared, Services
from dsec.reward.transition import step_fields, transition_of
from dsec.session.chance import Chance
from dsec.session.code import CodeNamespace
from dsec.session.code_errors import CodeError, telling
from dsec.session.documents import RewardDocument, SpecError, unseal
from dsec.session.interposition import Interposition, PlainInterposition
from dsec.session.raised import is_ours, told
from dsec.session.whole_episode import unpack_episode
from dsec_contracts.canonical import CanonicalError
from dsec_contracts.step import STEP_FIELDS

__all__ = [
    "Asks",
    "EnvScorer",
    "EpisodeScorer",
    "FunctionScorer",
    "RewardError",
    "Score",
    "Scorer",
    "is_per_episode",
    "load_scorer",
    "reward_document",
    "reward_fact",
]

MESSAGE_CHARS_MAX: Final = 4000


class Scorer:
    """Scores the steps of one reward spec, or its episodes. `needs_prior`: reads observations."""

    needs_prior: bool
    per_episode = False

    def score(
        self,
        step_fact: bytes,
        observation: bytes | None,
        next_observation: bytes | None,
        responses: bytes = b"",
    ) -> Score:
        """The reward of one step.

        Args:
            step_fact: canonical array of `STEP_FIELDS`.
            observation: canonical observation before the step; None or empty: not recorded.
            next_observation: the one after it.
            responses: canonical rows of `RESPONSE_FIELDS`; empty: no service was asked.

        Raises:
            Asks: responses are missing.
            RewardError: the step has none.
        """
        raise NotImplementedError

    def unload(self) -> None:
        """Forget the code. For when the spec is no longer in use."""


class EnvScorer(Scorer):
    """The environment's own reward, whatever it is: NaN too, for that is what it gave."""

    needs_prior = False

    def score(
        self,
        step_fact: bytes,
        observation: bytes | None,
        next_observation: bytes | None,
        responses: bytes = b"",
    ) -> Score:
        """See `Scorer`."""
        try:
            value = float(step_fields(step_fact)[STEP_FIELDS.index("env_reward")])
        except (CanonicalError, TypeError) as error:
            raise RewardError("step_malformed", str(error)) from error
        return Score(value, {ENV: [value, 1.0]})


class FunctionScorer(Scorer):
    """A user's function of one step."""

    needs_prior = True

    def __init__(
        self,
        function: Callable[..., Any],
        components: Components,
        services: Services,
        code: CodeNamespace,
        interposition: Interposition,
    ) -> None:
        self.function = function
        self._components = components
        self._services = services
        self._code = code
        self._interposition = interposition

    def score(
        self,
        step_fact: bytes,
        observation: bytes | None,
        next_observation: bytes | None,
        responses: bytes = b"",
    ) -> Score:
        """See `Scorer`."""
        try:
            given, step = self._given(step_fact, observation, next_observation)
        except CanonicalError as error:
            raise RewardError("step_malformed", str(error)) from error
        chance = _chance_of(step_fact, step)
        known = read_recorded(responses)
        self._interposition.enter(chance)
        try:
            result = self.function(given, self._services)
            if inspect.iscoroutine(result):
                result = run(result, known)
            # Within: a number of the user's own making runs code when it is converted.
            scores = self._components.scores(result)
        except BaseException as error:  # SystemExit too: user code must not end the process
            if is_ours(error) and isinstance(error, RewardError):
                raise
            if type(error) is NoServiceDeclared:
                raise RewardError("service_not_declared", str(error)) from error
            raise RewardError("reward_raised", told(error, MESSAGE_CHARS_MAX)) from error
        finally:
            self._interposition.exit(chance)
        return self._components.weighted(scores)

    def _given(
        self, step_fact: bytes, observation: bytes | None, next_observation: bytes | None
    ) -> tuple[Any, int]:
        """What the function is called with, and the step that is rewarded."""
        transition = transition_of(step_fact, observation, next_observation)
        return transition, transition.step

    @property
    def namespace(self) -> str:
        """What the names of the function's shipped modules begin with."""
        return self._code.name

    def unload(self) -> None:
        """See `Scorer`."""
        self._code.unload()


class EpisodeScorer(FunctionScorer):
    """A user's function of a whole episode: in place of a step's fact it is scored by what
    `pack_episode` gives, and no observations beside it."""

    per_episode = True

    def _given(
        self, step_fact: bytes, observation: bytes | None, next_observation: bytes | None
    ) -> tuple[Any, int]:
        transitions = [transition_of(*step) for step in unpack_episode(step_fact)]
        return transitions, transitions[-1].step


def load_scorer(
    spec_hash: str,
    content: bytes,
    interpose: Callable[[CodeNamespace], Interposition] = lambda _: PlainInterposition(),
) -> Scorer:
    """The scorer of a reward spec.

    Args:
        content: the spec's canonical bytes.
        interpose: what stands between this code and the process's clock and chance.

    Raises:
        RewardError: `reward_load_failed`, whatever is wrong.
    """
    document, files = reward_document(content)
    if document.entry == ENV:
        return EnvScorer()
    try:
        code = CodeNamespace(spec_hash, files)
        function = code.load(document.entry)
        with telling("entry", code.name):  # an attribute may be user code
            weights = getattr(function, "weights", None)
            services = getattr(function, "services", None)
            nonfinite = getattr(function, "nonfinite", None) is True
    except CodeError as error:
        raise RewardError("reward_load_failed", error.message[-MESSAGE_CHARS_MAX:]) from error
    if not callable(function):
        raise RewardError("reward_load_failed", f"{document.entry} is no function")
    try:
        weights = check_weights(document.weights or weights or {})
        names = check_services(document.services or services or ())
    except (TypeError, ValueError) as error:
        raise RewardError("reward_load_failed", str(error)) from error
    components = Components(weights, nonfinite=document.nonfinite or nonfinite)
    kind = EpisodeScorer if document.per == "episode" else FunctionScorer
    return kind(function, components, Services(names), code, interpose(code))


def reward_document(content: bytes) -> tuple[RewardDocument, dict[str, bytes]]:
    """The document and the files of a reward spec. Runs no user code.

    Raises:
        RewardError: `reward_load_failed`.
    """
    try:
        document, files = unseal(content, "reward")
    except SpecError as error:
        raise RewardError("reward_load_failed", str(error)[-MESSAGE_CHARS_MAX:]) from error
    assert isinstance(document, RewardDocument)
    return document, files


def is_per_episode(content: bytes) -> bool:
    """Whether a spec's function scores whole episodes. Runs no user code; what cannot be read does
    not."""
    try:
        document, _ = reward_document(content)
    except RewardError:
        return False
    return document.per == "episode"


def _chance_of(step_fact: bytes, step: int) -> Chance:
    digest = hashlib.sha256(b"dsec.reward.1\n" + step_fact).digest()
    chance = Chance(int.from_bytes(digest[:8], "big") >> 1)
    chance.position = step
    return chance
