"""Where the user code of a lane's sessions runs: their steps, and what they are told.

While a session's code runs, the memory that the supervisor reads says whose it is (`running.py`);
a process that runs out of memory, or that user code has forked, ends here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic_ns

from dsec.env_runtime.calls import Calls
from dsec.env_runtime.end_queue import EndQueue
from dsec.env_runtime.running import RunningSlot
from dsec.env_runtime.seats import Seat
from dsec.env_runtime.traces import LaneTraces
from dsec.platform.clock import now_ns
from dsec.session.io import Called, Ended, Input, Stepped


class Stepper:
    """Of one lane."""

    def __init__(
        self,
        running: RunningSlot,
        slice_ms: float,
        traces: LaneTraces,
        calls: Calls,
        ends: EndQueue,
    ) -> None:
        self._running = running
        self._slice_ns = int(slice_ms * 1e6)
        self._traces = traces
        self._calls = calls
        self._ends = ends

    async def step(
        self, ready: dict[bytes, Seat], seats: Mapping[bytes, Seat], onward: dict[bytes, Seat]
    ) -> list[tuple[Seat, Stepped]]:
        """One step for each that is ready. Gives way to the rest of the process after a slice of
        time.

        Args:
            seats: all of the lane's; who leaves meanwhile is passed over.
            onward: takes those that go on without an answer.
        """
        taken: list[tuple[Seat, Stepped]] = []
        slice_began = monotonic_ns()
        for raw_id, seat in ready.items():
            machine = seat.machine
            if machine.ended is not None or raw_id not in seats:
                continue
            now = monotonic_ns()
            if now - slice_began > self._slice_ns:
                self._running.clear()
                await asyncio.sleep(0)
                slice_began = now = monotonic_ns()
                if machine.ended is not None:  # cancelled meanwhile
                    continue
            seat.chain_before = machine.chain
            if seat.trace_steps:
                self._traces.answered(seat)  # of a session that goes on before its reward came
                seat.step_began_ns = now_ns()
            self._running.enter(seat.index, machine.steps, now)
            try:
                output = machine.step()
            except MemoryError:
                self._running.end_out_of_memory()
            self._running.end_if_forked()
            if type(output) is Stepped:
                taken.append((seat, output))
                seat.last = output
                seat.repeats = 0
                if output.called is not None:
                    self._calls.add(seat, output.called, again=False)
            elif type(output) is Called:
                seat.repeats = 0
                self._calls.add(seat, output, again=False)
            else:
                assert isinstance(output, Ended)
                self._ends.add(seat, output)
                continue
            if machine.awaiting is None:  # it goes on without what comes late
                onward[raw_id] = seat
        self._running.clear()
        return taken

    def deliver(self, seat: Seat, given: Input) -> Ended | None:
        """Give a session an input. Its user code runs."""
        machine = seat.machine
        self._running.enter(seat.index, machine.steps, monotonic_ns())
        try:
            ended = machine.deliver(given)
        except MemoryError:
            self._running.end_out_of_memory()
        self._running.end_if_forked()
        return ended

    def rest(self) -> None:
        """No session's code runs now."""
        self._running.clear()
