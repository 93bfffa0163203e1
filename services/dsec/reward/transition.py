"""From recorded bytes to the `Transition` that a reward function is given, anew at every call.

A full canonical decode of a step costs more than most reward functions. Most of a step is not for
them (inputs, hashes), and what is comes in few forms: so fields are found by skipping, short
immutable values are remembered, and arrays like one that was decoded before are read in one go.
Whatever is out of the ordinary goes the strict way. Both ways give the same values; a property
test says so.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dsec.reward.declaration import Transition
from dsec_contracts.canonical import CanonicalError, decode
from dsec_contracts.step import STEP_FIELDS

REMEMBERED_MAX: Final = 4096
LAYOUTS_MAX: Final = 256

_IMMUTABLE: Final = (bool, int, float, str, bytes, np.bool_, np.number)
_ARRAY_OF_FIELDS: Final = 0x80 | len(STEP_FIELDS)
_EMPTY_MAP: Final = b"\xa0"
_TRUE: Final = 0xF5
_double = struct.Struct(">d").unpack_from
_remembered: dict[bytes, Any] = {}


class _Layout(NamedTuple):
    """All that precedes the items of an array, and what it says."""

    prefix: bytes
    dtype: npt.DTypeLike
    shape: tuple[int, ...]


_layouts: dict[int, _Layout] = {}
"""By the length of the whole: the same prefix at the same length is the same kind of array."""


def transition_of(
    step_fact: bytes, observation: bytes | None, next_observation: bytes | None
) -> Transition:
    """A recorded step as its reward function sees it.

    Raises:
        CanonicalError: the bytes are no step.
    """
    try:
        step, episode, action, env_reward, terminated, truncated, info = _fields(step_fact)
    except (IndexError, ValueError, struct.error, RecursionError):
        fields = step_fields(step_fact)
        step, episode, _, _, action, _, env_reward, terminated, truncated, info = fields[:10]
    params = None
    if type(action) is dict and action.keys() == {"action", "action_params"}:
        action, params = action["action"], action["action_params"]
    return Transition(
        _observation(observation) if observation else None,
        action,
        params,
        _observation(next_observation) if next_observation else None,
        env_reward,
        terminated,
        truncated,
        info,
        step,
        episode,
    )


def step_fields(step_fact: bytes) -> list[Any]:
    """All `STEP_FIELDS`.

    Raises:
        CanonicalError: the bytes are no step.
    """
    fields = decode(step_fact)
    if type(fields) is not list or len(fields) != len(STEP_FIELDS):
        raise CanonicalError("not the array of a step's fields")
    return fields


def _fields(fact: bytes) -> tuple[Any, ...]:
    """The fields that a transition has. Raises one thing or another if they are not there."""
    if fact[0] != _ARRAY_OF_FIELDS:
        raise ValueError
    step_end = _end(fact, 1)
    episode_end = _end(fact, step_end)
    action_start = _end(fact, _end(fact, episode_end))  # behind inputs and calls
    action_end = _end(fact, action_start)
    reward = _end(fact, action_end)  # behind what was proposed
    info_start = reward + 11  # a float of 9 bytes, two booleans
    if fact[reward] != 0xFB or not {fact[reward + 9], fact[reward + 10]} <= {0xF4, _TRUE}:
        raise ValueError
    info_end = _end(fact, info_start)
    # Two hashes and a reset follow, and then nothing: a fact that is cut short is none.
    if fact[info_end] != 0x50 or _end(fact, info_end + 34) != len(fact):
        raise ValueError
    info = fact[info_start:info_end]
    return (
        _value(fact[1:step_end]),
        _value(fact[step_end:episode_end]),
        _value(fact[action_start:action_end]),
        _double(fact, reward + 1)[0],
        fact[reward + 9] == _TRUE,
        fact[reward + 10] == _TRUE,
        {} if info == _EMPTY_MAP else decode(info),
    )


def _end(data: bytes, at: int) -> int:
    """The position behind the item at `at`."""
    first = data[at]
    major, n = first >> 5, first & 31
    if major == 7:
        return at + (9 if n == 27 else 1)
    at += 1
    if n >= 24:
        size = 1 << (n - 24)
        if size > 8:
            raise ValueError
        n = int.from_bytes(data[at : at + size], "big")
        at += size
    if major < 2:
        return at
    if major < 4:
        return at + n
    if major == 6:
        return _end(data, at)
    for _ in range(n if major == 4 else 2 * n):
        at = _end(data, at)
    return at


def _value(raw: bytes) -> Any:
    value = _remembered.get(raw)
    if value is None:
        value = decode(raw)
        if isinstance(value, _IMMUTABLE) and len(raw) <= 64:
            if len(_remembered) >= REMEMBERED_MAX:
                _remembered.clear()
            _remembered[raw] = value
    return value


def _observation(raw: bytes) -> Any:
    layout = _layouts.get(len(raw))
    if layout is not None and raw.startswith(layout.prefix):
        items = np.frombuffer(raw, layout.dtype, -1, len(layout.prefix))
        return items.reshape(layout.shape).copy()
    value = decode(raw)
    # Only kinds whose items may be any bytes: nothing is left for the strict way to refuse.
    if type(value) is np.ndarray and value.dtype.kind in "iuf" and value.size:
        if len(_layouts) >= LAYOUTS_MAX:
            _layouts.clear()
        _layouts[len(raw)] = _Layout(raw[: len(raw) - value.nbytes], value.dtype, value.shape)
    return value
