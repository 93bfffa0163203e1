"""Settings of env-runtime, all from `DSEC_*` variables."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field

from dsec.platform.settings import Settings
from dsec_contracts.session import Name

WORKERS_UNASKED_MAX = 8
"""More take more memory and connections to the log than a node should give without being asked."""


def workers_unasked() -> int:
    """One worker a core: a session's code runs in one of them, and nothing else is that hungry."""
    # Of those that this process may use, where the system tells them apart.
    usable = getattr(os, "sched_getaffinity", None)
    return min(len(usable(0)) if usable else os.cpu_count() or 1, WORKERS_UNASKED_MAX)


class EnvRuntimeSettings(Settings):
    """One node: how many workers, how large, how patient."""

    workers: Annotated[int, Field(ge=1, le=256)] = Field(default_factory=workers_unasked)
    """Worker processes that share many sessions: one a core, eight at most, unless it is said."""
    isolated_workers: Annotated[int, Field(ge=0, le=16)] = 1
    """Worker processes that take one suspected session at a time."""
    lanes_per_worker: Annotated[int, Field(ge=1, le=8)] = 3
    """Two hide the wait for acknowledgements and rewards. The third is for sessions whose rewards
    come from outside services: nobody else's tick waits for theirs."""
    sessions_per_worker_max: Annotated[int, Field(ge=1)] = 6000
    """Seats of a worker, which heartbeats tell the scheduler; an isolated worker has one."""
    worker_memory_bytes_max: Annotated[int, Field(ge=1 << 28)] = 4 << 30
    """A worker that would need more dies with the reason `oom`."""
    heartbeat_period_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """How often a worker says that it is alive. At most half of `heartbeat_limit_s` in
    `scheduler.config.yaml`, or workers that live are taken for dead."""
    lane_wait_ms: Annotated[float, Field(ge=0)] = 50.0
    """A session whose reply is not back after this no longer holds up its lane."""
    reply_wait_s: Annotated[float, Field(gt=0)] = 5.0
    """A step without an answer is published again after this."""
    restart_wait_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a restart waits for the recorder to pass its placement."""
    tick_slice_ms: Annotated[float, Field(gt=0)] = 25.0
    """A tick gives way to other work of its process after this."""
    starts_in_flight_max: Annotated[int, Field(ge=1)] = 64
    """Sessions that a worker opens at a time; other placements wait for their turn."""
    drain_wait_s: Annotated[float, Field(ge=0)] = 5.0
    """How long a worker that is told to stop hands its sessions back; what is left is placed anew
    once it is fenced."""
    node: Name = "local"
    """What this machine is called in heartbeats: letters, digits, - and _."""
