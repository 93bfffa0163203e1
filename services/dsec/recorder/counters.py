"""What a recorder counts, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Since the process started."""

    leaderships: int = 0
    batches: int = 0
    messages: int = 0
    rows: int = 0
    """Rows handed to the log; those it had already are among them."""
    conflicts: int = 0
    superseded: int = 0
    dead_letters: int = 0
    parked: int = 0
    consumers_not_waited_for: int = 0
    """Of the last round of trimming."""
