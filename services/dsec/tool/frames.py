"""What the service and a calling process say to each other: canonical bytes with a length before.

Not pickle: user code lives in the calling process, and what it writes must not run in the service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dsec_contracts.canonical import decode, encode

FRAME_BYTES_MAX = 64 << 20
READY = b"ready"


class Order(NamedTuple):
    """One call that a calling process is to make."""

    arguments: str
    key: str
    """The idempotency key."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result."""

    code: str
    message: str
    retryable: bool = False
    retry_after_s: float | None = None
    """How long whoever refused asks to be left alone."""


class Refused(Exception):
    """A call has no result. `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


Outcome = bytes | Failure
"""The canonical result of a call, or why it has none."""


def reply(outcome: Outcome, *, spent: bool = False) -> bytes:
    """An outcome as bytes, and whether the process that had it must not be used again."""
    if isinstance(outcome, Failure):
        told = [outcome.code, outcome.message, outcome.retryable, outcome.retry_after_s]
        return encode([spent, *told])
    return encode([spent, outcome])


def read_reply(body: bytes) -> tuple[Outcome, bool]:
    """What `reply` was given.

    Raises:
        ValueError: the bytes are no reply.
    """
    try:
        spent, *told = decode(body)
        if len(told) == 1 and isinstance(told[0], bytes):
            return told[0], bool(spent)
        code, message, retryable, wait = told
        retry_after_s = None if wait is None else float(wait)
    except (TypeError, ValueError) as error:
        raise ValueError(f"no reply: {error}") from error
    return Failure(str(code), str(message), bool(retryable), retry_after_s), bool(spent)
