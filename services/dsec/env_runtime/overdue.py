"""Which outputs nobody answered in time: they are published again, under the same keys.

Whoever answers may have died with them, or the answer may have been lost. A step is asked for again
after `reply_wait_s`, a tool turn after its deadline and that, then after twice as long, and so on:
what is slow because there is too much of it is not to become more.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, zip_longest

from dsec.env_runtime.seats import Seat
from dsec.session.io import Called, Stepped

REPEATS_DOUBLED_MAX = 5
"""So often the wait doubles."""


def overdue(
    seats: Iterable[Seat], now_ns: int, reply_wait_ns: int
) -> tuple[list[tuple[Seat, Stepped]], list[tuple[Seat, Called]]]:
    """The steps and tool turns that are overdue. Counts one repetition for each session of them.

    Of each session the first step, then of each the second: those that must not travel together
    (`packing.split`) are apart.
    """
    late_steps: list[list[tuple[Seat, Stepped]]] = []
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
        late_steps.append([(seat, stepped) for stepped in steps])
    rounds = chain.from_iterable(zip_longest(*late_steps))
    return [step for step in rounds if step is not None], late_turns
