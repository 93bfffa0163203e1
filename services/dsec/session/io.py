"""What goes into a session and what comes out of it.

An input is what the world gives a session, an output what the session gives the world. Every
output names the inputs delivered since the output before it; a delivery that no output names did
not happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from dsec.session.chain import digest16
from dsec_contracts import keys
from dsec_contracts.canonical import decode, encode, head

REWARD: Final = "reward"
REWARD_MISSING: Final = "reward_missing"
REWARD_DEFERRED: Final = "reward_deferred"
CANCEL: Final = "cancel"
TOOL_RESULT: Final = "tool_result"
CURRICULUM: Final = "curriculum"

AWAITS_RESULTS: Final = -1
"""`SessionMachine.awaiting` while tools are waited for and no reward: no step has this number."""
AWAITS_LATE: Final = -2
"""`SessionMachine.awaiting` while late inputs are waited for: they are due, or are too many."""
REWARD_LAG_STEPS_MAX: Final = 32
"""A deferred reward is waited for so many steps later, where the request does not say."""

_KINDS = {
    kind: b"\x83" + encode(kind)
    for kind in (REWARD, REWARD_MISSING, REWARD_DEFERRED, CANCEL, TOOL_RESULT, CURRICULUM)
}
_FLOAT_BYTES = 9
_REWARD_TAIL_BYTES = 17
"""A reward's fact ends with its cause: a one-byte head and 16 bytes."""


class Input(NamedTuple):
    """One input. `fact` is what is hashed; `cause` must match the chain where it is given."""

    kind: Literal[
        "reward", "reward_missing", "reward_deferred", "cancel", "tool_result", "curriculum"
    ]
    ordinal: int
    fact: bytes
    value: float = 0.0
    cause: bytes = b""
    code: str = ""
    fatal: bool = False
    message: str = ""
    content: bytes = b""
    """Of a tool's answer: canonical, what it returned, or `[message, retryable]`."""

    def name(self) -> bytes:
        """Canonical `[kind, ordinal, hash16]`."""
        named = _KINDS[self.kind], head(0, self.ordinal), digest16(self.fact)
        return b"%b%b\x50%b" % named


def reward_input(step: int, value: float, fact: bytes, cause: bytes) -> Input:
    """The reward of a step."""
    return Input(REWARD, step, fact, value, cause)


def missing_input(step: int, code: str, fatal: bool, message: str, cause: bytes) -> Input:
    """The notice that a step's reward will not come."""
    fact = encode([step, code, fatal])
    return Input(REWARD_MISSING, step, fact, 0.0, cause, code, fatal, message)


def deferred_input(step: int, code: str, cause: bytes) -> Input:
    """The notice that a step's reward comes later."""
    return Input(REWARD_DEFERRED, step, encode([step, code]), 0.0, cause, code)


def result_input(ordinal: int, code: str, content: bytes, turn_hash: bytes) -> Input:
    """What came of a tool call. `code` is empty where it returned."""
    fact = encode([ordinal, code, content, turn_hash])
    return Input(TOOL_RESULT, ordinal, fact, 0.0, turn_hash, code, content=content)


def failure_content(message: str, retryable: bool) -> bytes:
    """The content of a failed call."""
    return encode([message, retryable])


@lru_cache(maxsize=65_536)
def step_cause(step: int, kind: str) -> bytes:
    """The key of what causes a step, in UTF-8: the start, or the input of the step before.

    `kind` is that of the input, or the key itself where that is another one.
    """
    if ":" in kind:
        return kind.encode()
    if step == 0:
        return keys.STARTED.encode()
    return _CAUSES.get(kind, keys.reward)(step - 1).encode()


_CAUSES: dict[str, Callable[[int], str]] = {
    REWARD_MISSING: keys.reward_missing,
    REWARD_DEFERRED: keys.reward_deferred,
}


def cancel_input(code: str, message: str = "") -> Input:
    """Somebody asked that the session end."""
    return Input(CANCEL, 0, encode([code]), code=code, message=message)


def curriculum_input(n: int, level: int) -> Input:
    """The `n`th change of the session's curriculum level."""
    return Input(CURRICULUM, n, encode([n, level]))


def reward_components(step: int, fact: bytes) -> dict[str, float]:
    """The components of the first reward of a step, name to score.

    The fact is `[step, 1, value, components, cause]`; only the components are decoded, and the
    same ones only once: a constant reward costs a lookup.
    """
    start = 2 + len(head(0, step)) + _FLOAT_BYTES
    return _components(fact[start:-_REWARD_TAIL_BYTES]).copy()


@lru_cache(maxsize=4096)
def _components(encoded: bytes) -> dict[str, float]:
    return {name: pair[0] for name, pair in decode(encoded).items()}


@dataclass(frozen=True, slots=True)
class Started:
    """Output: the first reset."""

    reset: bytes
    chain: bytes
    observation: bytes


class Call(NamedTuple):
    """One call. `arguments` is JSON text, as the agent gave it."""

    id: str
    name: str
    arguments: str

    def named(self) -> bytes:
        """Canonical `[id, hash16]`: how a step names it."""
        return encode([self.id, digest16(encode([self.name, self.arguments]))])


class Called(NamedTuple):
    """Output: one turn. `inputs` are canonical, those delivered since the output before it."""

    step: int
    turn: int
    inputs: bytes
    calls: tuple[Call, ...]
    turn_hash: bytes
    cause: bytes
    """UTF-8: the key of what caused it."""

    @property
    def fact(self) -> bytes:
        """What a re-execution must give again."""
        return turn_fact(self.step, self.turn, self.inputs, self.calls)


def turn_fact(step: int, turn: int, inputs: bytes, calls: Iterable[Call]) -> bytes:
    """The canonical `[step, turn, inputs, [[id, name, arguments], ...]]`."""
    return encode([step, turn, inputs, [list(call) for call in calls]])


def called(
    step: int, turn: int, inputs: bytes, calls: tuple[Call, ...], chain: bytes, cause: bytes
) -> Called:
    """A turn, hashed with the chain that it goes out from."""
    turn_hash = digest16(chain + turn_fact(step, turn, inputs, calls))
    return Called(step, turn, inputs, calls, turn_hash, cause)


class Stepped(NamedTuple):
    """Output: one environment step. `fact` is the canonical array of `STEP_FIELDS`."""

    step: int
    episode: int
    env_reward: float
    terminated: bool
    truncated: bool
    chain: bytes
    fact: bytes
    cause: bytes
    """UTF-8: the key of what caused the step."""
    observation: bytes
    prior: bytes
    reset_observation: bytes
    extras: bytes
    called: Called | None = None
    """The tools that were called together with the action."""
    closes_from: int | None = None
    """The first step of the episode that it closes, where that is rewarded as a whole."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Output: the end."""

    status: Literal["completed", "failed", "cancelled"]
    code: str
    steps: int
    episodes: int
    inputs: bytes
    chain: bytes
    message: str = ""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a machine needs to know of its session. No identity: no id, no times."""

    seed: int
    max_steps: int
    agent_stream: int = 0
    episodes_max: int | None = None
    policy_version: str = ""
    policy_state: Any = None
    wants_prior: bool = True
    lag_steps: int | None = None
    reward_lag_steps_max: int = REWARD_LAG_STEPS_MAX
    reward_per_episode: bool = False
    """One reward an episode, at its last step, instead of one a step."""
    curriculum_level: int | None = None
    """Of the first episode. None: the session has no curriculum."""
