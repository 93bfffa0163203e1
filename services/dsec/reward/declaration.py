"""What a reward function is given, and how one is declared."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])

COMPONENTS_MAX = 64
COMPONENT_NAME_CHARS_MAX = 128
SERVICES_MAX = 32
_SERVICE_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}")


@dataclass(frozen=True, slots=True)
class Transition:
    """One environment step, as a reward function sees it.

    Every function gets values of its own: what it does to them reaches nobody else.

    Attributes:
        observation: what the agent saw before the step; None where the environment's spec records
            no observations of that size (`observations: {above: none}`).
        action: what the agent chose and the environment was given.
        action_params: the parameters beside the action; None if there were none.
        next_observation: the observation after the step, the final one of an episode included;
            None like `observation`.
        env_reward: the environment's own reward.
        terminated: whether the environment reached an end of its own.
        truncated: whether the environment cut the episode (a time limit).
        info: the environment's info of this step.
        step: from 0 over the whole session.
        episode: from 0.
    """

    observation: Any
    action: Any
    action_params: Any
    next_observation: Any
    env_reward: float
    terminated: bool
    truncated: bool
    info: Any
    step: int
    episode: int


@overload
def declare(function: F, /) -> F: ...
@overload
def declare(
    *,
    weights: Mapping[str, float] | None = None,
    per: Literal["step", "episode"] = "step",
    services: Sequence[str] = (),
    nonfinite: bool = False,
) -> Callable[[F], F]: ...
def declare(
    function: F | None = None,
    /,
    *,
    weights: Mapping[str, float] | None = None,
    per: str = "step",
    services: Sequence[str] = (),
    nonfinite: bool = False,
) -> F | Callable[[F], F]:
    """Declare a reward function; users write `@dsec.reward(weights={...}, per="step")`.

    The function is `def f(t: Transition, services)` or `async def`, and returns a number or a
    mapping of named numbers. It must depend on the transition and on what services answer, and
    keep nothing between calls. One that is declared with `per="episode"` gets the list of all
    transitions of an episode instead, once, when the episode is over, or cut by the session's
    `max_steps`; its reward is that of the episode's last step. The declaration is kept on the
    function, by the names of the arguments.

    Args:
        weights: what each component counts; exactly these must be returned. Without weights every
            returned component counts 1.0.
        per: "step" or "episode".
        services: names of the outside services that it may ask. Each is declared once for the
            installation (`dsec services declare`).
        nonfinite: whether NaN and infinities are meant; otherwise they are refused.

    Raises:
        TypeError, ValueError: says which argument is wrong.
    """
    if per not in ("step", "episode"):
        raise ValueError(f'per must be "step" or "episode", not {per!r}')
    checked = check_weights(weights or {})
    named = check_services(services)

    def decorate(decorated: F) -> F:
        if not callable(decorated):
            raise TypeError(f"dsec.reward decorates a function, not {type(decorated).__name__}")
        declared: Any = decorated
        declared.weights = dict(checked)
        declared.per = per
        declared.services = list(named)
        declared.nonfinite = bool(nonfinite)
        return decorated

    return decorate if function is None else decorate(function)


def check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights as plain floats.

    Raises:
        TypeError, ValueError: names the weight that is wrong.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights maps names to numbers, and is no {type(weights).__name__}")
    if len(weights) > COMPONENTS_MAX:
        raise ValueError(f"{len(weights)} weights; a reward has {COMPONENTS_MAX} components")
    checked: dict[str, float] = {}
    for name, weight in weights.items():
        check_name(name)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise TypeError(f"weight {name!r} must be a number, not {type(weight).__name__}")
        # Checked as what is kept: a number of the user's own class may become another.
        number = float(weight)
        if not math.isfinite(number):
            raise ValueError(f"weight {name!r} is {number}")
        checked[name] = number
    return checked


def check_services(services: Sequence[str]) -> tuple[str, ...]:
    """Names of services, without repetition.

    Raises:
        TypeError, ValueError: names the one that is wrong.
    """
    if isinstance(services, str) or not isinstance(services, Sequence):
        raise TypeError("services is a list of names")
    for name in services:
        if not isinstance(name, str) or not _SERVICE_NAME.fullmatch(name):
            raise ValueError(f"services: {name!r:.80} names no service: letters, digits, - and _")
    if len(services) > SERVICES_MAX:
        raise ValueError(f"{len(services)} services; a reward may ask {SERVICES_MAX}")
    return tuple(dict.fromkeys(str.__str__(name) for name in services))


def check_name(name: Any) -> None:
    """Refuse what cannot name a component.

    Raises:
        TypeError, ValueError: says why.
    """
    if type(name) is not str:
        raise TypeError(f"a component's name must be text, not {type(name).__name__}")
    if not 0 < len(name) <= COMPONENT_NAME_CHARS_MAX:
        raise ValueError(
            f"a component's name has 1 to {COMPONENT_NAME_CHARS_MAX} characters, not {len(name)}"
        )
