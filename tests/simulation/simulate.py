"""A seed in, a verdict out."""

from __future__ import annotations

import gc
import hashlib
import logging
import random
from dataclasses import dataclass
from typing import Any

from tests.simulation import programs
from tests.simulation.clock import VirtualLoop, virtual_clocks
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


_RUNS_A_COLLECTION = 25
_runs = 0


def _collect_seldom() -> None:
    """A run makes a hundred thousand objects, all of which go with it: looked through once in a
    while, and not again and again while they are made."""
    global _runs
    if _runs == 0:
        gc.collect()
        gc.freeze()
    elif _runs % _RUNS_A_COLLECTION == 0:
        gc.collect()
    _runs += 1


def simulate(seed: int, *, switches: Switches | None = None, plan: Plan | None = None) -> Result:
    """Run a seed."""
    told = plan or plan_of(seed, len(programs.KINDS))
    world = World(seed, told, switches or Switches())
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what the services say of faults that are meant
    _collect_seldom()
    collects = gc.isenabled()
    gc.disable()
    try:
        world.live()
        found = list(failures(world))
    finally:
        logging.disable(before)
        if collects:
            gc.enable()
    loop = world.loop
    return Result(seed, found, world.lines, told, world.kills, loop.time(), loop.callbacks)


def told_of(result: Result) -> dict[str, Any]:
    """A result as JSON has it."""
    return {
        "seed": result.seed,
        "ok": result.ok,
        "failures": result.failures,
        "kills": result.kills,
        "sessions": len(result.plan.sessions),
        "virtual_s": round(result.virtual_s, 3),
        "digest": result.digest,
    }


def portion(seeds: range) -> list[dict[str, Any]]:
    """Run some seeds, in a process of their own."""
    with virtual_clocks(VirtualLoop(), random.Random(0)):
        return [told_of(simulate(seed)) for seed in seeds]
