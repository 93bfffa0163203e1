"""A seed in, a verdict out."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from tests.simulation import programs
from tests.simulation.faults import Plan, plan_of
from tests.simulation.switches import Switches
from tests.simulation.verdict import failures
from tests.simulation.world import World


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a seed."""

    seed: int
    failures: list[str]
    trace: list[str]
    plan: Plan
    kills: int
    virtual_s: float
    callbacks: int

    @property
    def ok(self) -> bool:
        """Whether all that must hold did."""
        return not self.failures

    @property
    def digest(self) -> str:
        """Of all that happened: two runs of one seed have the same."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def simulate(seed: int, *, switches: Switches | None = None, plan: Plan | None = None) -> Result:
    """Run a seed."""
    told = plan or plan_of(seed, len(programs.KINDS))
    world = World(seed, told, switches or Switches())
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what the services say of faults that are meant
    try:
        world.live()
        found = list(failures(world))
    finally:
        logging.disable(before)
    loop = world.loop
    return Result(seed, found, world.lines, told, world.kills, loop.time(), loop.callbacks)
