"""The wall clock, in one place, so that it can be handed in everywhere else."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """The time now, in UTC."""
    return datetime.now(UTC)
