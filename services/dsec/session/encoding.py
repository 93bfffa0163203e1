"""What an environment returned, as canonical bytes. Environments reuse and mutate the arrays that
they return, so what is recorded is a copy, made here, at the boundary."""

from __future__ import annotations

from typing import Any

from numpy import ndarray

from dsec.session.facts import EMPTY_MAP
from dsec.session.stops import Stop, encoded, is_dict, run_user, short
from dsec_contracts.canonical import encode


class ObservationEncoder:
    """Encodes the observations of one session. Mostly each is an array like the one before it, and
    only the numbers behind the head are new."""

    __slots__ = ("_head", "_key")

    def __init__(self) -> None:
        self._key: Any = None
        self._head = b""

    def encode(self, observation: Any) -> bytes:
        """The canonical bytes of an observation.

        Raises:
            Stop: it has none.
        """
        if type(observation) is ndarray:
            key = (observation.dtype, observation.shape)
            if key == self._key:
                data: bytes = observation.tobytes()
                return self._head + data
            if observation.dtype.byteorder in "<=|" and observation.dtype.kind in "biuf":
                body = observation.tobytes()
                whole = encode(observation)
                self._key = key
                self._head = whole[: len(whole) - len(body)]
                return whole
        return encoded("env_invalid", "the observation", observation)


def encode_info(info: Any) -> bytes:
    """The canonical bytes of the environment's info.

    Raises:
        Stop: it has none.
    """
    if not is_dict(info):
        raise Stop("env_invalid", f"info must be a dict, not {short(info)}")
    info = plain_info(info)
    return encoded("env_invalid", "the info", info) if info else EMPTY_MAP


def plain_info(info: Any) -> Any:
    """A subclass of dict is user code, at every question that it is asked."""
    if type(info) is not dict and is_dict(info):
        return run_user("env_invalid", dict, info)
    return info
