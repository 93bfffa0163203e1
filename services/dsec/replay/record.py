"""What a record says of itself: the check of sessions that cannot be executed again (D0).

Nothing is run. The hashes of the chain are computed anew from the recorded facts, every input that
an output names has to be in the log with the hash that it is named with, and the end has to close
the chain. A fact that was changed afterwards is found; one that the environment would not give
again is not, and nothing could find it.
"""

from __future__ import annotations

from typing import Any

from dsec.session.chain import chain_end, chain_next, chain_start, digest16
from dsec.session.divergence import Divergence
from dsec.session.recorded import Recorded, RecordedStep
from dsec_contracts.canonical import CanonicalError, decode
from dsec_contracts.step import STEP_FIELDS


def record_difference(recorded: Recorded) -> Divergence | None:
    """The first place where a record contradicts itself: `expected` is the log's."""
    if recorded.reset is None:
        if recorded.steps:
            return Divergence(None, "reset", None, "the log has steps and no start")
        return _end_difference(recorded, None, {})
    chain = chain_start(recorded.reset)
    if chain != recorded.chain_0:
        return Divergence(None, "chain_0", recorded.chain_0, chain)
    known: dict[tuple[str, int], bytes] = {
        (given.kind, given.ordinal): digest16(given.fact) for given in recorded.inputs
    }
    for step in recorded.steps:
        difference = _step_difference(step, chain, known)
        if difference is None:
            difference = _turns_difference(recorded, step.step, (chain, step.chain), known)
        if difference is not None:
            return difference
        chain = step.chain
    difference = _turns_difference(recorded, len(recorded.steps), (chain,), known)
    return difference or _end_difference(recorded, chain, known)


def _step_difference(
    step: RecordedStep, chain: bytes, known: dict[tuple[str, int], bytes]
) -> Divergence | None:
    try:
        names = dict(zip(STEP_FIELDS, decode(step.fact), strict=True))["inputs"]
        found = _inputs_difference(step.step, names, known)
    except (CanonicalError, ValueError, TypeError):
        return Divergence(step.step, "fact", step.fact, None)
    if found is not None:
        return found
    if (actual := chain_next(chain, step.fact)) != step.chain:
        return Divergence(step.step, "chain", step.chain, actual)
    return None


def _inputs_difference(
    step: int | None, names: list[Any], known: dict[tuple[str, int], bytes]
) -> Divergence | None:
    for kind, ordinal, digest in names:
        if (actual := known.get((kind, ordinal))) != digest:
            told = None if actual is None else [kind, ordinal, actual]
            return Divergence(step, "inputs", [kind, ordinal, digest], told)
    return None


def _turns_difference(
    recorded: Recorded, step: int, chains: tuple[bytes, ...], known: dict[tuple[str, int], bytes]
) -> Divergence | None:
    """The tool calls of a step: before it, or with its action and so behind it."""
    turn_n = 0
    while (turn := recorded.turns.get((step, turn_n))) is not None:
        turn_n += 1
        hashes = [digest16(chain + turn.fact) for chain in chains]
        if turn.turn_hash not in hashes:
            return Divergence(step, "turn_hash", turn.turn_hash, hashes[0])
        if (found := _inputs_difference(step, decode(turn.inputs), known)) is not None:
            return found
    return None


def _end_difference(
    recorded: Recorded, chain: bytes | None, known: dict[tuple[str, int], bytes]
) -> Divergence | None:
    ended = recorded.ended
    if ended is None:
        return None
    if ended.steps != len(recorded.steps):
        return Divergence(None, "steps", ended.steps, len(recorded.steps))
    try:
        found = _inputs_difference(None, decode(ended.inputs), known)
    except (CanonicalError, ValueError, TypeError):
        return Divergence(None, "inputs", ended.inputs, None)
    if found is not None:
        return found
    status, code, episodes = ended.status, ended.code, ended.episodes
    actual = chain_end(chain, status, code, ended.steps, episodes, ended.inputs)
    return None if actual == ended.chain else Divergence(None, "chain", ended.chain, actual)
