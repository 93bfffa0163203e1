"""When a service's rewards are deferred: a pure decision on what all replicas report of it.

Each replica reports its p95 into one shared value and decides on all of them, by the same rule, in
the same compare-and-set. Above the service's threshold its rewards are deferred at once; back they
go only when every replica has seen less than half of it for `RECOVER_S`, since a service that is
just at its threshold would flip for ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

WINDOW_S: Final = 10.0
"""How long an attempt counts."""
SAMPLES_MIN: Final = 5
"""Fewer say nothing about a 95th percentile."""
SAMPLES_MAX: Final = 4096
RECOVER_RATIO: Final = 0.5
RECOVER_S: Final = 5.0
REPORT_S_MAX: Final = 5.0
"""A report that is older is a dead replica's, or one's that has nothing to do there."""

Mode = Literal["synchronous", "deferred"]


@dataclass(frozen=True, slots=True)
class Report:
    """What one replica sees of a service. `p95_ms`: None: too few attempts to say."""

    at: float
    p95_ms: float | None = None
    in_flight: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What all replicas know of a service. `calm_since`: from when on it has been fast again."""

    mode: Mode = "synchronous"
    since: float = 0.0
    calm_since: float | None = None
    told_since: float = 0.0
    """The last `since` that was made known."""
    reports: Mapping[str, Report] = field(default_factory=dict)

    def is_told_by(self, replica_switched: bool, now: float) -> bool:
        """Whether a replica has to make the switch known: the one that made it, and should that
        have died before it did, any other."""
        if self.told_since == self.since:
            return False
        return replica_switched or now - self.since > REPORT_S_MAX

    def p95_ms(self, now: float) -> float | None:
        """The worst that a replica reports."""
        reports = fresh(self.reports, now).values()
        return max((r.p95_ms for r in reports if r.p95_ms is not None), default=None)


def decide(standing: Standing, replica: str, report: Report, latency_switch_ms: float) -> Standing:
    """The standing after a replica's report, which says what time it is."""
    now = report.at
    reports = {**fresh(standing.reports, now), replica: report}
    standing = replace(standing, reports=reports)
    p95_ms = standing.p95_ms(now)
    if standing.mode == "synchronous":
        if p95_ms is not None and p95_ms > latency_switch_ms:
            return replace(standing, mode="deferred", since=now, calm_since=None)
        return standing
    if p95_ms is not None and p95_ms >= latency_switch_ms * RECOVER_RATIO:
        return replace(standing, calm_since=None)
    # An instant that is yet to come was told by a clock that is ahead, perhaps of a dead replica.
    calm_since = now if standing.calm_since is None else min(standing.calm_since, now)
    if now - calm_since >= RECOVER_S:
        return replace(standing, mode="synchronous", since=now, calm_since=None)
    return replace(standing, calm_since=calm_since)


def fresh(reports: Mapping[str, Report], now: float) -> dict[str, Report]:
    """The reports that are of now."""
    return {name: r for name, r in reports.items() if abs(now - r.at) <= REPORT_S_MAX}


class Latencies:
    """How long a service took lately, as one replica saw it."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES_MAX)

    def add(self, now: float, ms: float) -> None:
        """An attempt ended, well or not."""
        self._samples.append((now, ms))

    def p95_ms(self, now: float, under_way_ms: Iterable[float] = ()) -> float | None:
        """The 95th percentile; None: too few attempts.

        Args:
            under_way_ms: of attempts that have not ended: how long they have taken so far. A
                service that answers nobody would have no samples at all.
        """
        while self._samples and self._samples[0][0] < now - WINDOW_S:
            self._samples.popleft()
        ended = [ms for _, ms in self._samples]
        slowest = max(ended, default=0.0)
        all_ms = sorted([*ended, *(ms for ms in under_way_ms if ms > slowest / 2)])
        if len(all_ms) < SAMPLES_MIN:
            return None
        return all_ms[math.ceil(0.95 * len(all_ms)) - 1]
