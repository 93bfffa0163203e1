"""What becomes of spans: how many wait, how many were taken by the receiver, how many are lost.

Each number has one thread that writes it, so that counting takes no lock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, weakref_slot=True)
class Delivery:
    """Counts of one process."""

    waiting_spans_max: int
    accepted: int = 0
    """Put into the queue; written by the service's thread, as is `refused`."""
    refused: int = 0
    """Not put into it, since it was full."""
    taken: int = 0
    """Taken out of it to be sent; written by the exporter's thread, as is `failed`."""
    failed: int = 0
    """Taken out and not delivered."""
    sent: int = 0
    closed: bool = False
    """Nothing more is sent: what has not been is lost, failed already or not."""

    def accept(self) -> bool:
        """Whether one more may wait; counts it either way."""
        if self.accepted - self.taken >= self.waiting_spans_max:
            self.refused += 1
            return False
        self.accepted += 1
        return True

    @property
    def lost(self) -> int:
        """Spans that no receiver will have."""
        return self.refused + (self.accepted - self.sent if self.closed else self.failed)

    def after_fork(self) -> None:
        """In a child: what waited is its parent's to send, and the SDK forgets it here."""
        self.accepted = self.refused = self.taken = self.failed = self.sent = 0
