"""The first difference between what the log has and what came out: which output, and which field.

Everything here compares and nothing drives: see `rerun.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsec.session.io import Called, Ended, Started, Stepped
from dsec.session.recorded import Recorded, RecordedStep
from dsec_contracts.canonical import CanonicalError, decode, encode
from dsec_contracts.step import STEP_FIELDS

_ENDED_FIELDS = ("status", "code", "steps", "episodes", "inputs", "chain")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first output that came out differently.

    `step` is None for the first reset (`reset`, `chain_0`) and for the end (`status`, `code`,
    `steps`, `episodes`, `inputs`, `chain`). `field` is one of `STEP_FIELDS` for a step, or
    `chain` or `anchor`; `status` where one side ended and the other did not; `fact` where the
    recorded bytes are no fact at all. `expected` is the log's, `actual` the re-execution's.
    """

    step: int | None
    field: str
    expected: Any
    actual: Any


def compare_start(output: Started | Ended, recorded: Recorded) -> Divergence | None:
    """A start that came out, with what the log has of it."""
    if isinstance(output, Ended):
        return Divergence(None, "status", "started", end_told(output))
    if output.reset != recorded.reset:
        return Divergence(None, "reset", decoded(recorded.reset or b""), decoded(output.reset))
    if output.chain != recorded.chain_0:
        return Divergence(None, "chain_0", recorded.chain_0, output.chain)
    return None


def first_difference(step: RecordedStep, output: Stepped) -> Divergence:
    """The first field in which a step that came out is another than the log has."""
    expected, actual = decoded(step.fact), decoded(output.fact)
    if isinstance(expected, list) and len(expected) == len(STEP_FIELDS):
        for name, one, other in zip(STEP_FIELDS, expected, actual, strict=True):
            if encode(one) != encode(other):
                return Divergence(step.step, name, one, other)
    return Divergence(step.step, "fact", step.fact, output.fact)


def end_difference(expected: Ended, actual: Ended) -> Divergence | None:
    """An end that came out, with what the log has of it."""
    for name in _ENDED_FIELDS:
        one, other = getattr(expected, name), getattr(actual, name)
        if one != other:
            if name == "inputs":
                one, other = decoded(one), decoded(other)
            return Divergence(None, name, one, other)
    return None


def calls_told(turn: Called) -> list[list[str]]:
    """The calls of a turn, for people."""
    return [list(call) for call in turn.calls]


def decoded(data: bytes) -> Any:
    """The value of canonical bytes, for people; the bytes, where they are none."""
    try:
        return decode(data)
    except CanonicalError:
        return data


def end_told(ended: Ended) -> str:
    """An end, for people."""
    return f"{ended.status}: {ended.code}: {ended.message}".removesuffix(": ")
