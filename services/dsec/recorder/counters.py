"""What a recorder counts, in one place, and under which names it is told."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.platform.telemetry import Telemetry, metrics


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
    lag_s: float | None = None
    """From the stream to the commit, of the last message committed."""

    def tell(self, telemetry: Telemetry) -> None:
        """Have telemetry read them."""
        telemetry.counter(metrics.COMMITS, lambda: self.batches)
        telemetry.counter(metrics.MESSAGES_RECORDED, lambda: self.messages)
        telemetry.counter(metrics.ROWS_RECORDED, lambda: self.rows)
        telemetry.counter(metrics.CONFLICTS, lambda: self.conflicts)
        telemetry.counter(metrics.SUPERSEDED, lambda: self.superseded)
        telemetry.counter(metrics.DEAD_LETTERS, lambda: self.dead_letters)
        telemetry.counter(metrics.PARKED, lambda: self.parked)
        telemetry.gauge(metrics.RECORDER_LAG, lambda: self.lag_s)
