"""The canonical bytes of what a session's outputs say: what is hashed, compared and stored.

A step's fact has the fields of `dsec_contracts.step.STEP_FIELDS`, in that order. It is put together
here from parts that are canonical already, since the encoder, asked for the whole, would cost more
than the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from dsec.session.chain import digest16
from dsec_contracts.canonical import encode, head
from dsec_contracts.step import STEP_FIELDS

EMPTY_LIST = b"\x80"
EMPTY_MAP = b"\xa0"
NULL = b"\xf6"
_TRUE, _FALSE = b"\xf5", b"\xf4"
_HASH16 = b"\x50"
_STEP_HEAD = head(4, len(STEP_FIELDS))
_RESET_HEAD = head(4, 3)
_FLOAT = Struct(">Bd").pack
_NAN = encode(float("nan"))


def listed(items: Sequence[bytes]) -> bytes:
    """The list of items that are canonical already: names of inputs, or calls."""
    return head(4, len(items)) + b"".join(items) if items else EMPTY_LIST


def step_fact(
    step: int,
    episode: int,
    inputs: bytes,
    calls: bytes,
    action: bytes,
    env_reward: float,
    terminated: bool,
    truncated: bool,
    info: bytes,
    state: bytes,
    observation: bytes,
    reset: bytes,
) -> bytes:
    """The fact of a step. No human has overridden its action.

    Args:
        state: 16 bytes, the environment's state hash behind the step.
        observation: its canonical bytes, of which the fact has the hash.
        reset: the fact of the reset behind it; `NULL` where there was none.
    """
    return b"".join(
        (
            _STEP_HEAD,
            head(0, step),
            head(0, episode),
            inputs,
            calls,
            action,
            NULL,
            _FLOAT(0xFB, env_reward) if env_reward == env_reward else _NAN,
            _TRUE if terminated else _FALSE,
            _TRUE if truncated else _FALSE,
            info,
            _HASH16,
            state,
            _HASH16,
            digest16(observation),
            reset,
        )
    )


def reset_fact(state: bytes, observation: bytes, info: bytes) -> bytes:
    """The fact of a reset: `[state_hash, observation_hash, info]`.

    Args:
        state: 16 bytes, the environment's state hash.
        observation, info: their canonical bytes.
    """
    return b"".join((_RESET_HEAD, _HASH16, state, _HASH16, digest16(observation), info))
