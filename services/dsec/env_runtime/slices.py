"""Time for opening seats: the sessions that are live keep half of it, however many others are
re-executed.

Re-execution runs in slices, one session's at a time, each followed by as long a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from time import monotonic_ns
from typing import TypeVar

from dsec.env_runtime.running import RunningSlot

T = TypeVar("T")


class Slices:
    """Hands out time to re-executions."""

    def __init__(self, running: RunningSlot, slice_ms: float, has_live: Callable[[], bool]) -> None:
        """Prepare.

        Args:
            has_live: whether there is any session that a pause would be for.
        """
        self._running = running
        self._slice_ns = slice_ms * 1e6
        self._has_live = has_live
        self._turn = asyncio.Lock()
        """Held by whoever re-executes, for a slice of time and as long a pause."""

    async def executed(self, work: Generator[int, None, T], index: int) -> T:
        """What work comes to that runs user code of the session at `index`; it yields each step
        before that runs."""
        step = next(work)
        while True:
            async with self._turn:
                began = monotonic_ns()
                try:
                    while (now := monotonic_ns()) - began < self._slice_ns:
                        self._running.enter(index, step, now)
                        step = next(work)
                        self._running.end_if_forked()  # before it runs the next step
                except StopIteration as done:
                    found: T = done.value
                    return found
                except MemoryError:
                    self._running.end_out_of_memory()
                finally:
                    self._running.end_if_forked()  # before it clears what it shares with us
                    self._running.clear()
                await asyncio.sleep((monotonic_ns() - began) / 1e9 if self._has_live() else 0)
