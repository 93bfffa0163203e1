"""The wall clock, in one place, so that it can be handed in everywhere else."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

_START = datetime(1970, 1, 1, tzinfo=UTC)


def utc_now() -> datetime:
    """The time now, in UTC."""
    return datetime.now(UTC)


def now_ns() -> int:
    """The time now, in nanoseconds since 1970: how spans are timed."""
    return time.time_ns()


def nanoseconds(at: datetime) -> int:
    """A time in nanoseconds since 1970, exact to the microsecond that it has."""
    return (at - _START) // timedelta(microseconds=1) * 1_000
