"""What can go wrong with the bus, in words that tell a caller what to do."""

from __future__ import annotations

from typing import Literal

Refusal = Literal["fenced", "expected_sequence"]


class BusError(Exception):
    """Something about the bus."""


class BusUnavailable(BusError):
    """The bus could not be reached in time."""


class Undecided(BusUnavailable):
    """A replicated stream has not agreed yet on a message that this one depends on: send again."""


class NotPermitted(BusError):
    """The server does not let this connection's user do that."""

    def __init__(self, verb: str, subject: str) -> None:
        super().__init__(
            f"the NATS server does not let this user {verb} {subject}: DSEC_NATS_URL names a user "
            "that may not, or the server's permissions are older than this version"
        )
        self.verb = verb
        self.subject = subject


class PublishRefused(BusError):
    """The server refused a publish: the writer is fenced, or somebody wrote before it."""

    def __init__(self, reason: Refusal, detail: str) -> None:
        super().__init__(f"publish refused ({reason}): {detail}")
        self.reason = reason


class TooLarge(BusError):
    """A message over the server's limit. It was not sent."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"a message for {subject} has {size_bytes} bytes with its headers; the server takes "
            f"{limit_bytes}: put the large part into the object store and send its key"
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class BadMessage(BusError):
    """A message that is no event of this system, now or after any retry."""
