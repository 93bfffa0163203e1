"""How many calls a session made before each of its turns: what quotas are held against.

The session's own count, not the tool service's: it is a function of the session's outputs, so it is
the same after a restart, and whichever replica makes the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dsec.platform.bounded import Bounded
from dsec.session.io import Called

TURNS_KEPT_MAX = 64
"""Turns that can be asked for again: those whose answers are outstanding."""


class CallCounts:
    """The counts of one session."""

    __slots__ = ("_before", "_total")

    def __init__(self, turns: Iterable[Called] = ()) -> None:
        """Counts of a session that made these turns."""
        self._total: Counter[str] = Counter()
        self._before: Bounded[tuple[int, int], Counter[str]] = Bounded(TURNS_KEPT_MAX)
        for turn in sorted(turns, key=_place):
            self.before(turn)

    def before(self, turn: Called) -> Counter[str]:
        """Calls by tool before a turn; the turn is counted once, however often it is asked for."""
        place = _place(turn)
        if place not in self._before:
            self._before.remember(place, Counter(self._total))
            self._total.update(call.name for call in turn.calls)
        return self._before[place]


def _place(turn: Called) -> tuple[int, int]:
    return turn.step, turn.turn
