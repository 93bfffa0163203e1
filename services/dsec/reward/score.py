"""From one recorded transition to its reward. No clock, no entropy, no I/O.

The reward service and the replay use the same code, so a reward that is computed anew has the same
bytes. A function runs under a `Chance` that is derived from the step's fact alone: whoever scores
the step, when, and after which others, it draws the same.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from dsec.reward.declaration import COMPONENTS_MAX, check_name, check_weights
from dsec.reward.fact import ENV, reward_body, reward_fact
from dsec.reward.transition import step_fields, transition_of
from dsec.session.chance import Chance
from dsec.session.code import CodeNamespace
from dsec.session.code_errors import CodeError
from dsec.session.documents import RewardDocument, SpecError, unseal
from dsec.session.machine import Interposition, PlainInterposition
from dsec_contracts.canonical import CanonicalError
from dsec_contracts.step import STEP_FIELDS

__all__ = [
    "EnvScorer",
    "FunctionScorer",
    "RewardError",
    "Score",
    "Scorer",
    "load_scorer",
    "reward_document",
    "reward_fact",
]

UNNAMED: Final = "reward"
"""The component of a function that returns a bare number and declares no weights."""
MESSAGE_CHARS_MAX: Final = 4000
FRAMES_MAX: Final = 12
NAMES_MAX: Final = 1024
"""Names of components remembered as checked."""

Code = Literal[
    "reward_load_failed",
    "reward_raised",
    "reward_invalid",
    "reward_deadline",
    "reward_crashed",
    "step_malformed",
]


class RewardError(Exception):
    """A step has no reward. `code` is stable, `message` is for the author of the function."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code: Code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Score:
    """A reward: the weighted total, and each component's score and weight."""

    value: float
    components: dict[str, list[float]]

    def body(self) -> bytes:
        """Value and components, one after the other, as they stand in a fact."""
        return reward_body(self.value, self.components)


class NoServiceDeclared(LookupError):
    """A reward function asked for a service, and none is declared."""


class Services(Mapping[str, Any]):
    """The outside services of a reward function: none yet. Read-only and empty."""

    def __getitem__(self, name: str) -> Any:
        raise NoServiceDeclared(f"no service is declared, so there is no {name!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """Refused like any look-up: a default would hide that the service is missing."""
        return self[name]

    def __contains__(self, name: object) -> bool:
        return False

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


_SERVICES: Final = Services()


class Scorer:
    """Scores the steps of one reward spec. `needs_prior`: it reads the observation before."""

    needs_prior: bool

    def score(
        self, step_fact: bytes, observation: bytes | None, next_observation: bytes | None
    ) -> Score:
        """The reward of one step.

        Args:
            step_fact: canonical array of `STEP_FIELDS`.
            observation: canonical observation before the step; None or empty: not recorded.
            next_observation: the one after it.

        Raises:
            RewardError: the step has none.
        """
        raise NotImplementedError

    def unload(self) -> None:
        """Forget the code. For when the spec is no longer in use."""


class EnvScorer(Scorer):
    """The environment's own reward, whatever it is: NaN too, for that is what it gave."""

    needs_prior = False

    def score(
        self, step_fact: bytes, observation: bytes | None, next_observation: bytes | None
    ) -> Score:
        """See `Scorer`."""
        try:
            value = float(step_fields(step_fact)[STEP_FIELDS.index("env_reward")])
        except (CanonicalError, TypeError) as error:
            raise RewardError("step_malformed", str(error)) from error
        return Score(value, {ENV: [value, 1.0]})


class FunctionScorer(Scorer):
    """A user's function."""

    needs_prior = True

    def __init__(
        self,
        function: Callable[..., Any],
        weights: Mapping[str, float],
        code: CodeNamespace,
        interposition: Interposition,
    ) -> None:
        self._function = function
        self._weights = {name: weights[name] for name in sorted(weights)}
        self._names = set(weights)  # those that were checked
        self._code = code
        self._interposition = interposition

    def score(
        self, step_fact: bytes, observation: bytes | None, next_observation: bytes | None
    ) -> Score:
        """See `Scorer`."""
        try:
            transition = transition_of(step_fact, observation, next_observation)
        except CanonicalError as error:
            raise RewardError("step_malformed", str(error)) from error
        chance = _chance_of(step_fact, transition.step)
        self._interposition.enter(chance)
        try:
            result = self._function(transition, _SERVICES)
            if inspect.iscoroutine(result):
                result = _drive(result)
            # Within: a number of the user's own making runs code when it is converted.
            scores = self._scores(result)
        except RewardError:
            raise
        except BaseException as error:  # SystemExit too: user code must not end the process
            raise RewardError("reward_raised", _told(error)) from error
        finally:
            self._interposition.exit(chance)
        return self._weighted(scores)

    def unload(self) -> None:
        """See `Scorer`."""
        self._code.unload()

    def _scores(self, result: Any) -> dict[str, float]:
        if type(result) is not dict and not isinstance(result, Mapping):
            return {self._only_name(): _finite(result, None)}
        if not result:
            raise RewardError("reward_invalid", "the function returned no component")
        if len(result) > COMPONENTS_MAX:
            raise RewardError(
                "reward_invalid", f"{len(result)} components; a reward has {COMPONENTS_MAX}"
            )
        if self._weights and result.keys() != self._weights.keys():
            self._refuse_names(result)
        for name in result.keys() - self._names:
            self._check_name(name)
        # One order, since the sum of floats depends on it.
        return {name: _finite(result[name], name) for name in self._weights or sorted(result)}

    def _check_name(self, name: Any) -> None:
        try:
            check_name(name)
        except (TypeError, ValueError) as error:
            raise RewardError("reward_invalid", str(error)) from None
        if len(self._names) < NAMES_MAX:
            self._names.add(name)

    def _only_name(self) -> str:
        if len(self._weights) > 1:
            raise RewardError(
                "reward_invalid",
                f"the function must return a mapping of {', '.join(sorted(self._weights))}",
            )
        return next(iter(self._weights), UNNAMED)

    def _refuse_names(self, result: Mapping[Any, Any]) -> NoReturn:
        unknown = [name for name in result if name not in self._weights]
        if unknown:
            raise RewardError(
                "reward_invalid", f"component {unknown[0]!r:.200} has no declared weight"
            )
        missing = sorted(self._weights.keys() - result.keys())
        # Left out is not zero: a made-up zero would be learnt from.
        raise RewardError("reward_invalid", f"component {missing[0]!r} was not returned")

    def _weighted(self, scores: dict[str, float]) -> Score:
        value = 0.0
        components: dict[str, list[float]] = {}
        for name, score in scores.items():
            weight = self._weights.get(name, 1.0)
            components[name] = [score, weight]
            value += weight * score
        if not math.isfinite(value):
            raise RewardError("reward_invalid", f"the weighted total is {value}")
        return Score(value, components)


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
    except CodeError as error:
        raise RewardError("reward_load_failed", error.message[-MESSAGE_CHARS_MAX:]) from error
    if not callable(function):
        raise RewardError("reward_load_failed", f"{document.entry} is no function")
    try:
        weights = check_weights(document.weights or getattr(function, "weights", None) or {})
    except (TypeError, ValueError) as error:
        raise RewardError("reward_load_failed", str(error)) from error
    return FunctionScorer(function, weights, code, interpose(code))


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


def _chance_of(step_fact: bytes, step: int) -> Chance:
    digest = hashlib.sha256(b"dsec.reward.1\n" + step_fact).digest()
    chance = Chance(int.from_bytes(digest[:8], "big") >> 1)
    chance.position = step
    return chance


def _drive(coroutine: Any) -> Any:
    """Run an `async def` that awaits nothing of the outside world."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    coroutine.close()
    raise RewardError(
        "reward_invalid", "the function awaited something, and no service is declared"
    )


def _finite(score: Any, name: Any) -> float:
    """A score as a plain float; an infinite or missing one is refused by its component's name."""
    which = "the reward" if name is None else f"component {name!r:.200}"
    kind = type(score)
    if kind is not float:
        # `ndim`: an array of one item converts too, and is a mistake in most functions.
        if not hasattr(kind, "__float__") or getattr(score, "ndim", 0) != 0:
            raise RewardError("reward_invalid", f"{which} is no number but {kind.__name__}")
        try:
            score = float(score)
        except OverflowError:
            raise RewardError("reward_invalid", f"{which} is too large for a float") from None
    if not math.isfinite(score):
        raise RewardError("reward_invalid", f"{which} is {score}")
    return float(score)


def _told(error: BaseException) -> str:
    """The error and its traceback, for people."""
    return "".join(traceback.format_exception(error, limit=-FRAMES_MAX))[-MESSAGE_CHARS_MAX:]
