"""A whole episode as the bytes that its reward is computed from.

A function that is declared `per="episode"` gets all transitions of an episode at once. Whoever
scores (the reward service, verification, scoring anew) packs the recorded steps the same way, so
that they all give the function the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dsec_contracts.canonical import CanonicalError, decode, encode


class EpisodeStep(NamedTuple):
    """One recorded step: its fact, and the canonical observations before and behind it; empty where
    they are not recorded."""

    fact: bytes
    observation: bytes
    next_observation: bytes


def pack_episode(steps: Iterable[EpisodeStep]) -> bytes:
    """Canonical `[[fact, observation, next_observation], ...]`, in the order of the steps."""
    return encode([list(step) for step in steps])


def unpack_episode(packed: bytes) -> list[EpisodeStep]:
    """What `pack_episode` was given.

    Raises:
        CanonicalError: the bytes are no episode, or one without a step.
    """
    found = decode(packed)
    if not isinstance(found, list) or not found:
        raise CanonicalError("not the steps of an episode")
    try:
        return [EpisodeStep(*map(_bytes, step)) for step in found]
    except TypeError as error:
        raise CanonicalError("not the steps of an episode") from error


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise CanonicalError("not the bytes of a step")
    return value
