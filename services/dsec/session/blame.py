"""Whose fault it is that an environment raised: its own, or that of the action it was given.

Environments assert themselves that an action is one of theirs, as Gymnasium's do, so nothing is
asked before a step; only when one was raised at is the action looked at.
"""

from __future__ import annotations

from typing import Any

from dsec.session.raised import MESSAGE_CHARS_MAX
from dsec.session.stops import ACTION_INVALID, ENV_RAISED, Stop, stop_of
from dsec_contracts.canonical import decode

TOLD_CHARS_MAX = 500
_FACED = {"action", "action_params"}


def raised_at(error: BaseException, action_space: Any, action: bytes) -> Stop:
    """The end of a session whose environment raised at an action.

    Args:
        action_space: the one that the agent was told of, None where there is none.
        action: as it is recorded: the environment may have changed the one that it was given.

    Raises:
        MemoryError: there is no more.
    """
    stop = stop_of(ENV_RAISED, error)
    if stop.code != ENV_RAISED or (sentence := _outside(action_space, action)) is None:
        return stop
    told = str(stop)[-(MESSAGE_CHARS_MAX - TOLD_CHARS_MAX - 1) :]
    return Stop(ACTION_INVALID, f"{told.rstrip()}\n{sentence}")


def _outside(space: Any, action: bytes) -> str | None:
    """That an action is not in the space, in a sentence; None: it is, or nobody can say so."""
    try:
        value = decode(action)
        if space is None or space.contains(value):
            return None
        # Spaces mostly leave out the parameters, which the environment is given all the same.
        if type(value) is dict and value.keys() == _FACED and space.contains(value["action"]):
            return None
        return f"step() returned the action {value!r}, outside {space!r}"[:TOLD_CHARS_MAX]
    except MemoryError:
        raise
    except BaseException:  # noqa: BLE001 - a space of the user's own; the environment's error counts
        return None
