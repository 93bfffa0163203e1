"""The audit of provenance: pure, from rows of the log to counts that add up over sessions.

An agent may say with an action why it was taken, how sure it is and which tool call it rests on
(`provenance{reasoning, confidence, tool_call_id}`). That is recorded and never trusted; here it is
compared with the calls that happened and the rewards that came. The rewards are first revisions,
so that repeating an audit gives the same counts whatever was revised since. A first reward that
comes after its session's end, as of one that was cancelled, counts for whoever looks later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Complex, Real
from typing import Any, NamedTuple, Protocol

from dsec.session import log_row
from dsec_contracts import keys
from dsec_contracts.canonical import decode
from dsec_contracts.evaluation import CONFIDENCE_BINS, UNKNOWN_CALLS_MAX

NAMED_CALLS_MAX = 256
"""Tool calls that one step may name; what it names beyond is not looked at."""
_ID_CHARS_MAX = 256


class Row(Protocol):
    """What is read of a row."""

    @property
    def kind(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def step(self) -> int | None: ...
    @property
    def value(self) -> float | None: ...
    @property
    def fact(self) -> bytes: ...
    @property
    def extras(self) -> bytes | None: ...


class UnknownCall(NamedTuple):
    """A step that rests on a call that had not happened."""

    step: int
    tool_call_id: str


def _zeros() -> list[int]:
    return [0] * CONFIDENCE_BINS


def _sums() -> list[float]:
    return [0.0] * CONFIDENCE_BINS


@dataclass(slots=True)
class Audit:
    """Counts over steps; see `dsec_contracts.evaluation.PolicySanityFact` for each."""

    steps: int = 0
    with_provenance: int = 0
    provenance_malformed: int = 0
    tool_calls: int = 0
    tool_calls_without_provenance: int = 0
    unknown_calls: list[UnknownCall] = field(default_factory=list)
    unknown_calls_total: int = 0
    confident: list[int] = field(default_factory=_zeros)
    confidence_sum: list[float] = field(default_factory=_sums)
    reward_sum: list[float] = field(default_factory=_sums)
    confidence_square_sum: float = 0.0
    reward_square_sum: float = 0.0
    product_sum: float = 0.0
    reward_min: float | None = None
    reward_max: float | None = None

    @property
    def says_nothing(self) -> bool:
        """Whether there is neither provenance nor a tool call."""
        return not (self.with_provenance or self.provenance_malformed or self.tool_calls)

    @property
    def ok(self) -> bool:
        """No step rests on a call that did not happen, none is malformed, and an agent that gives
        provenance gives it for all of its calls."""
        silent = self.with_provenance and self.tool_calls_without_provenance
        return not (self.unknown_calls_total or self.provenance_malformed or silent)

    def add(self, other: Audit) -> None:
        """Take in another session's, or another part's, counts."""
        for name in (
            "steps",
            "with_provenance",
            "provenance_malformed",
            "tool_calls",
            "tool_calls_without_provenance",
            "unknown_calls_total",
            "confidence_square_sum",
            "reward_square_sum",
            "product_sum",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for n in range(CONFIDENCE_BINS):
            self.confident[n] += other.confident[n]
            self.confidence_sum[n] += other.confidence_sum[n]
            self.reward_sum[n] += other.reward_sum[n]
        room = UNKNOWN_CALLS_MAX - len(self.unknown_calls)
        self.unknown_calls += other.unknown_calls[:room]
        lows = [r for r in (self.reward_min, other.reward_min) if r is not None]
        highs = [r for r in (self.reward_max, other.reward_max) if r is not None]
        self.reward_min, self.reward_max = min(lows, default=None), max(highs, default=None)

    def rewarded(self, confidence: float, reward: float) -> None:
        """One step that was this sure and got this reward."""
        n = min(int(confidence * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)
        self.confident[n] += 1
        self.confidence_sum[n] += confidence
        self.reward_sum[n] += reward
        self.confidence_square_sum += confidence * confidence
        self.reward_square_sum += reward * reward
        self.product_sum += confidence * reward
        self.reward_min = reward if self.reward_min is None else min(self.reward_min, reward)
        self.reward_max = reward if self.reward_max is None else max(self.reward_max, reward)

    @property
    def calibration_error(self) -> float | None:
        """The mean distance of confidence and reward, over bins by their counts (expected
        calibration error). None where rewards are not within 0 to 1, as shares of success are."""
        n = sum(self.confident)
        low, high = self.reward_min, self.reward_max
        if not n or low is None or high is None or low < 0 or high > 1:
            return None
        pairs = zip(self.confidence_sum, self.reward_sum, strict=True)
        return sum(abs(confidence - reward) for confidence, reward in pairs) / n

    @property
    def correlation(self) -> float | None:
        """Pearson's, of confidence and reward over steps. None where one of them is constant, or
        rewards are so large that their squares cannot be added up."""
        n = sum(self.confident)
        if n < 2:
            return None
        x, y = sum(self.confidence_sum), sum(self.reward_sum)
        spread_x = n * self.confidence_square_sum - x * x
        spread_y = n * self.reward_square_sum - y * y
        if not math.isfinite(spread_y):
            return None
        # What rounding leaves of a constant is no spread.
        least = 1e-12 * n
        if spread_x <= least * self.confidence_square_sum or (
            spread_y <= least * self.reward_square_sum
        ):
            return None
        # Of each root first: the product of both may be out of range where neither is.
        both = (n * self.product_sum - x * y) / (math.sqrt(spread_x) * math.sqrt(spread_y))
        return max(-1.0, min(1.0, both)) if math.isfinite(both) else None


def audit(steps: int, rows: Iterable[Row]) -> Audit:
    """The audit of one session.

    Args:
        steps: that the session took.
        rows: its steps that have extras, its rewards, its tool calls, in any order; others are
            passed over.
    """
    found = Audit(steps=steps)
    said: dict[int, Any] = {}
    rewards: dict[int, float] = {}
    made: dict[str, int] = {}
    for row in rows:
        if row.kind == log_row.STEPPED and row.extras and row.step is not None:
            provenance = decode(row.extras).get("provenance")
            if provenance is not None:
                said[row.step] = provenance
        elif row.kind == log_row.REWARD_SCORED and row.step is not None:
            if row.key == keys.reward(row.step) and row.value is not None:
                rewards[row.step] = row.value
        elif row.kind == log_row.TOOL_CALLED:
            fact = decode(row.fact)
            made.update((call["id"], fact["step"]) for call in fact["calls"])
    found.tool_calls = len(made)
    named: set[str] = set()
    for step in sorted(said):
        _look_at(found, step, said[step], rewards.get(step), made, named)
    found.tool_calls_without_provenance = len(made.keys() - named)
    return found


def _look_at(
    found: Audit,
    step: int,
    provenance: Any,
    reward: float | None,
    made: dict[str, int],
    named: set[str],
) -> None:
    if not isinstance(provenance, dict):
        found.provenance_malformed += 1
        return
    found.with_provenance += 1
    confidence = provenance.get("confidence")
    if confidence is not None:
        number = _number(confidence)
        if not 0 <= number <= 1:
            found.provenance_malformed += 1
        elif reward is not None and math.isfinite(reward):
            found.rewarded(number, reward)
    ids = provenance.get("tool_call_id")
    for call_id in (ids if isinstance(ids, list) else [ids])[:NAMED_CALLS_MAX]:
        if call_id is None:
            continue
        if made.get(call_id, step + 1) <= step if isinstance(call_id, str) else False:
            named.add(call_id)
            continue
        found.unknown_calls_total += 1
        if len(found.unknown_calls) < UNKNOWN_CALLS_MAX:
            found.unknown_calls.append(UnknownCall(step, _told(call_id)))


def _number(value: Any) -> float:
    """A confidence as a float: NumPy's and tensors' numbers too, since agents take theirs from
    those. NaN for what is none: arrays of more than a number, complex ones, those out of range."""
    is_complex = isinstance(value, Complex) and not isinstance(value, Real)
    if is_complex or isinstance(value, bool | str | bytes | dict | list):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _told(call_id: Any) -> str:
    """What an agent took for the id of a call, as text that can be published."""
    return str(call_id)[:_ID_CHARS_MAX].encode("utf-8", "replace").decode()
