"""What a reward function returned: its components checked, weighted and added up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from dsec.reward.declaration import COMPONENTS_MAX, check_name
from dsec.reward.fact import reward_body

UNNAMED: Final = "reward"
"""The component of a function that returns a bare number and declares no weights."""
NAMES_MAX: Final = 1024
"""Names of components remembered as checked."""


Code = Literal[
    "reward_load_failed",
    "reward_raised",
    "reward_invalid",
    "reward_deadline",
    "reward_crashed",
    "step_malformed",
    "spec_not_found",
    "reward_nondeterministic",
    "reward_stateful",
    "responses_malformed",
    "service_not_declared",
    "service_unanswered",
    "blob_not_found",
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


class Components:
    """The components of one reward spec."""

    def __init__(self, weights: Mapping[str, float], *, nonfinite: bool = False) -> None:
        """Prepare.

        Args:
            nonfinite: NaN and infinities are meant, and recorded as they are.
        """
        self._nonfinite = nonfinite
        self._weights = {name: weights[name] for name in sorted(weights)}
        self._names = set(weights)  # those that were checked

    def scores(self, result: Any) -> dict[str, float]:
        """The score of every component that a function returned, in the order of their names.

        Raises:
            RewardError: `reward_invalid`; numbers of the user's own making may raise anything.
        """
        if type(result) is not dict and not isinstance(result, Mapping):
            return {self._only_name(): self._number(result, None)}
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
        if not self._weights:
            for name in result:
                # Text of the user's own class may say that it equals a name that was checked.
                if type(name) is not str:
                    self._check_name(name)
        # One order, since the sum of floats depends on it.
        names = self._weights or sorted(result)
        return {name: self._number(result[name], name) for name in names}

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
                "reward_invalid",
                f"component {unknown[0]!r:.200} has no declared weight; "
                f"{', '.join(sorted(map(repr, self._weights))):.500} have one",
            )
        missing = sorted(self._weights.keys() - result.keys())
        # Left out is not zero: a made-up zero would be learnt from.
        raise RewardError("reward_invalid", f"component {missing[0]!r} was not returned")

    def weighted(self, scores: dict[str, float]) -> Score:
        """The weighted total of `scores`, summed in their order."""
        value = 0.0
        components: dict[str, list[float]] = {}
        for name, score in scores.items():
            weight = self._weights.get(name, 1.0)
            components[name] = [score, weight]
            value += weight * score
        if not self._nonfinite and not math.isfinite(value):
            raise RewardError("reward_invalid", f"the weighted total is {value}")
        return Score(value, components)

    def _number(self, score: Any, name: Any) -> float:
        number = _plain(score, name)
        if not self._nonfinite and not math.isfinite(number):
            raise RewardError(
                "reward_invalid",
                f"{_which(name)} is {number}; where that is meant, declare `nonfinite: true`",
            )
        return number


def _which(name: Any) -> str:
    return "the reward" if name is None else f"component {name!r:.200}"


def _plain(score: Any, name: Any) -> float:
    """A score as a plain float; what is none is refused by its component's name."""
    kind = type(score)
    if kind is not float:
        # `ndim`: an array of one item converts too, and is a mistake in most functions.
        if not hasattr(kind, "__float__") or getattr(score, "ndim", 0) != 0:
            raise RewardError("reward_invalid", f"{_which(name)} is no number but {kind.__name__}")
        try:
            score = float(score)
        except OverflowError:
            raise RewardError(
                "reward_invalid", f"{_which(name)} is too large for a float"
            ) from None
    return float(score)
