"""A budget as arithmetic: which instants a replica may take for its next requests.

All replicas share one number per service or tool, the next free instant; a replica that wants some
moves it on by compare-and-set and has the instants in between for its own, at least `spacing_s`
apart from each other and from everybody else's. So nobody has to be elected or counted: a replica
that is added takes its share at once, and one that is killed wastes what it had reserved, at most
`AHEAD_S` and `BATCH_S` of the budget. (GCRA with its instants reserved ahead. The well-kept
limiters that were looked at, `limits`, `pyrate-limiter`, `aiolimiter`, admit one request at a time
and have no store on NATS; a round trip a request would cost more than most services take.)

Why a window holds: an instant is used within `VALID_S` or not at all, so the requests of any
`WINDOW_S` have instants of `WINDOW_S + VALID_S`, and `spacing_s` leaves room in that for no more
than the budget and a twentieth. Times are Unix seconds of the replicas' clocks; clocks that differ
by a constant shift a replica's instants and change no rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 10.0
"""In any so long a budget is kept."""
OVER_MAX: Final = 1.05
"""Times the budget: what the requests of a window may come to at the most."""
VALID_S: Final = 0.4
"""How late an instant may be used. The more, the less is lost where a process is held up; with
this a hundredth of the window is left for requests that travel unequally long."""
AHEAD_S: Final = 0.5
"""How far in the future the first instant that is taken may be."""
BATCH_S: Final = 0.25
"""How much of a budget is taken at a time. All of it, also where its end is further ahead: who took
only as much as just came within reach would ask for each instant by itself."""
CLOCK_S_MAX: Final = 5.0
"""An instant further ahead than can be was taken by a clock that is wrong, and is not kept."""
CLOSED_S_MAX: Final = 60.0
"""How long a service may have itself left alone (`Retry-After`)."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the replicas share of one budget. `closed_until`: the service asked to be left alone."""

    next_at: float = 0.0
    closed_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Grant:
    """Instants that were taken, and the ledger after it; or none, and how long to wait."""

    ledger: Ledger
    instants: tuple[float, ...]
    wait_s: float = 0.0


def spacing_s(qps_budget: float) -> float:
    """How far apart the instants of a budget are, in seconds."""
    most = max(1, math.floor(qps_budget * WINDOW_S * OVER_MAX + 1e-9))
    return max(1 / qps_budget, (WINDOW_S + VALID_S) / most)


def reserve(ledger: Ledger, now: float, qps_budget: float, wanted: int) -> Grant:
    """Take up to `wanted` instants, at least one of them unless it is too early."""
    spacing = spacing_s(qps_budget)
    start = max(_believed(ledger, now, spacing), _closed_until(ledger, now), now)
    if start > now + AHEAD_S:
        return Grant(ledger, (), start - now - AHEAD_S)
    count = max(1, min(wanted, int(BATCH_S / spacing)))
    instants = tuple(start + n * spacing for n in range(count))
    return Grant(Ledger(start + count * spacing, ledger.closed_until), instants)


def close(ledger: Ledger, now: float, for_s: float) -> Ledger:
    """The ledger of a service that wants to be left alone for a time, up to `CLOSED_S_MAX`."""
    until = now + min(for_s, CLOSED_S_MAX)
    return Ledger(ledger.next_at, max(_closed_until(ledger, now), until))


def is_usable(instant: float, now: float) -> bool:
    """Whether a request may still go at an instant whose time has come."""
    return now <= instant + VALID_S


def _believed(ledger: Ledger, now: float, spacing: float) -> float:
    furthest = now + AHEAD_S + max(BATCH_S, spacing) + CLOCK_S_MAX
    return ledger.next_at if ledger.next_at <= furthest else now + AHEAD_S


def _closed_until(ledger: Ledger, now: float) -> float:
    return ledger.closed_until if ledger.closed_until <= now + CLOSED_S_MAX + CLOCK_S_MAX else now
