"""A worker process as its supervisor has it, and the limits it is watched by."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, monotonic_ns

from dsec.env_runtime.death import Death, judge
from dsec.env_runtime.memory import resident_bytes
from dsec.env_runtime.running import RunningSlot, Starter
from dsec.platform.user_limits import kill_group, started_by
from dsec_contracts.worker import DeathReason

log = logging.getLogger(__name__)


def oom_kills() -> int:
    """How many processes the system has killed for memory so far; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@dataclass(slots=True)
class Child:
    """A worker process."""

    name: str
    isolated: bool
    process: asyncio.subprocess.Process
    slot: RunningSlot
    began: float = field(default_factory=monotonic)
    oom_kills: int = field(default_factory=oom_kills)
    """Of the system, before it started."""
    killed_for: DeathReason | None = None
    fenced_at_s: float | None = None

    def starter(self) -> Starter | None:
        """Whose code has started a process in it, and how far that session was; where it shares its
        worker with others, how far it was when it did."""
        found = self.slot.starter()
        return replace(found, step=self.slot.last_step) if found and self.isolated else found

    def _kill(self, reason: DeathReason) -> None:
        if self.killed_for is None:
            self.killed_for = reason
            kill_group(self.process.pid)

    def check_deadline(self) -> None:
        """Kill it if the step that runs in it takes too long."""
        running = self.slot.read()
        if running is None:
            return
        for_s = (monotonic_ns() - running.since_ns) / 1e9
        if for_s > running.step_deadline_s:
            log.warning("session %s: step %d takes %.1f s", running.session_id, running.step, for_s)
            self._kill("step_deadline")

    def check_processes(self, count_max: int) -> None:
        """Kill it if its code runs more processes than it may."""
        if started_by(self.process.pid, count_max) > count_max:
            log.warning("worker %s: its code runs over %d processes", self.name, count_max)
            self._kill("signal")

    def check_memory(self, bytes_max: int) -> None:
        """Kill it if it uses more memory than it may."""
        used = resident_bytes(self.process.pid)
        if used is not None and used > bytes_max:
            log.warning("worker %s uses %d bytes", self.name, used)
            self._kill("oom")

    def death(self, code: int) -> Death | None:
        """Why it died, with this exit code. None: nothing to report."""
        death = judge(
            code,
            self.slot.read(),
            self.killed_for,
            out_of_memory=self.slot.is_out_of_memory or oom_kills() > self.oom_kills,
            starter=self.starter(),
        )
        return death if self.fenced_at_s is None else None
