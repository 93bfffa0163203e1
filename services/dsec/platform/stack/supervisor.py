"""Keeps one process running: when it dies unasked, it is started again, after a growing pause.

Anything in the stack may die at any time and has to come back by itself. A process that dies at
once each time must not turn into a busy loop, so the pause doubles up to a bound, and is short
again once the process has stood for a while. A server that does not come back is given up after
a bounded number of attempts, since nothing works without it; services are tried for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dsec.platform.stack.errors import StackError
from dsec.platform.stack.process import ChildProcess, ProcessSpec, describe_exit

RESTART_PAUSE_FIRST_S = 0.1
RESTART_PAUSE_MAX_S = 10.0
RESTART_DOUBLINGS_MAX = 10
STABLE_AFTER_S = 30.0
AILMENT_PERIOD_S = 2.0


class SupervisedProcess:
    """One process that is restarted until it is stopped, or until `restarts_max` in a row."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        restarts_max: int | None,
        on_change: Callable[[], None],
        on_progress: Callable[[str], None],
    ) -> None:
        self.spec = spec
        self.restarts = 0
        self._restarts_max = restarts_max
        self._on_change = on_change
        self._on_progress = on_progress
        self._child: ChildProcess | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def child(self) -> ChildProcess | None:
        """The process as it was last started."""
        return self._child

    @property
    def watching(self) -> asyncio.Task[None]:
        """Ends only when the process is given up, with the StackError that says why."""
        if self._watch is None:
            raise RuntimeError(f"{self.spec.name} has not been started")
        return self._watch

    async def start(self) -> None:
        """Start and wait until ready; raise StackError when that fails. Then keep it running."""
        await self._start_once()
        self._watch = asyncio.create_task(self._keep_running(), name=f"watch {self.spec.name}")

    async def stop(self) -> None:
        """Stop for good."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._child is not None:
            await self._child.stop()

    async def _start_once(self) -> None:
        self._child = ChildProcess(self.spec)
        self._on_change()
        await self._child.wait_ready()

    async def _keep_running(self) -> None:
        clock = asyncio.get_running_loop()
        failures = 0
        while True:
            up_since_s = clock.time()
            reason = await self._until_it_dies()
            failures = 1 if clock.time() - up_since_s >= STABLE_AFTER_S else failures + 1
            while True:
                self._give_up_after_bound(failures, reason)
                pause_s = restart_pause_s(failures)
                self._on_progress(f"{reason} Starting it again in {pause_s:g} s.")
                await asyncio.sleep(pause_s)
                try:
                    await self._start_once()
                    break
                except StackError as error:
                    reason = str(error)
                    failures += 1
            self.restarts += 1
            self._on_progress(f"{self.spec.name} was started again.")

    async def _until_it_dies(self) -> str:
        assert self._child is not None
        status = await self._exit_of(self._child)
        return f"{self.spec.name} {describe_exit(status)}; its log is {self.spec.log_path}."

    async def _exit_of(self, child: ChildProcess) -> int:
        """How it ends. One that runs and is of no use is stopped, and so started again."""
        if self.spec.ailment is None:
            return await child.wait_exit()
        # Not earlier: what a new start does not heal must not count as one that keeps dying.
        next_s = asyncio.get_running_loop().time() + STABLE_AFTER_S
        while True:
            try:
                async with asyncio.timeout_at(next_s):
                    return await child.wait_exit()
            except TimeoutError:
                next_s += AILMENT_PERIOD_S
                if (said := self.spec.ailment()) is not None:
                    self._on_progress(said)
                    await child.stop()

    def _give_up_after_bound(self, failures: int, reason: str) -> None:
        if self._restarts_max is not None and failures > self._restarts_max:
            raise StackError(
                f"{self.spec.name} was started again {self._restarts_max} times and did not "
                f"stay up, so the stack stops. {reason}"
            )


def restart_pause_s(failures: int) -> float:
    """Seconds to wait before the restart that follows the n-th failure in a row (from 1)."""
    doublings = min(failures - 1, RESTART_DOUBLINGS_MAX)
    return float(min(RESTART_PAUSE_MAX_S, RESTART_PAUSE_FIRST_S * 2**doublings))
