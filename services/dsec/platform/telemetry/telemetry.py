"""What services see of telemetry: spans that are over, and numbers that are read when asked for.

A span is handed over once it is over, with both of its times, and is not open anywhere before that:
nothing has to be carried from function to function or from process to process, no session costs
memory for being traced, and a process that dies leaves no half of a span. Metrics are plain
integers that a service counts anyway; a thread of the exporter's reads them.

`Telemetry` itself is the one that is off, and what every service gets unless it is told a receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dsec.platform.telemetry.ids import SpanRef
from dsec.platform.telemetry.metrics import Metric

LINKS_MAX = 8
"""Of a span. A tick may concern thousands of sessions, and each link costs some 13 us."""

Attributes = Mapping[str, str | int | float | bool]


class Span(NamedTuple):
    """A span that is over. Times are in nanoseconds since 1970."""

    ref: SpanRef
    name: str
    start_ns: int
    end_ns: int
    parent: SpanRef | None = None
    attributes: Attributes = {}  # noqa: RUF012 - a tuple's default, and a Mapping
    links: Sequence[SpanRef] = ()
    error: str | None = None


class Telemetry:
    """Telemetry that is off: keeps nothing, costs nothing."""

    enabled = False

    def keeps(self, trace_id: int) -> bool:
        """Whether spans of this trace are kept. To be asked before one is put together."""
        return False

    def emit(self, span: Span) -> None:
        """Send a span, later and from another thread. Never waits, never raises; on one thread."""

    def counter(self, metric: Metric, read: Callable[[], int]) -> None:
        """Send what `read` says: a count since the process started."""

    def gauge(self, metric: Metric, read: Callable[[], float | None]) -> None:
        """Send what `read` says: how it is now. None: there is nothing to say."""

    def histogram(self, metric: Metric) -> Callable[[float], None]:
        """What takes one value after the other."""
        return _ignore

    def close(self) -> None:
        """Send what has not been sent yet, for a bounded time. Nothing may follow."""


def _ignore(value: float) -> None:
    """A value that nobody wants."""


OFF = Telemetry()
