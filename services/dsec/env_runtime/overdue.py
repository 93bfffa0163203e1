"""Which outputs nobody answered in time: they are published again, under the same keys.

Whoever answers may have died with them, or the answer may have been lost. A step is asked for again
after `reply_wait_s`, a tool turn after its deadline and that, then after twice as long, and so on:
what is slow because there is too much of it is not to become more.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsec.env_runtime.seats import Seat
from dsec.session.io import Called, Stepped

REPEATS_DOUBLED_MAX = 5
"""So often the wait doubles."""


def overdue(
    seats: Iterable[Seat], now_ns: int, reply_wait_ns: int
) -> tuple[list[tuple[Seat, Stepped]], list[tuple[Seat, Called]]]:
    """The steps and tool turns that are overdue. Counts one repetition for each session of them."""
    late_steps: list[tuple[Seat, Stepped]] = []
    late_turns: list[tuple[Seat, Called]] = []
    for seat in seats:
        if seat.machine.awaiting is None:
            continue
        steps, turns = seat.awaited()
        waited = now_ns - seat.published_ns
        if turns and not steps:
            waited -= int(max(map(seat.call_deadline_s, turns)) * 1e9)
        if waited <= reply_wait_ns << min(seat.repeats, REPEATS_DOUBLED_MAX):
            continue
        seat.repeats += 1
        late_turns += [(seat, turn) for turn in turns]
        late_steps += [(seat, stepped) for stepped in steps]
    return late_steps, late_turns
