"""Composition root: a node's supervisor, or, with `--worker`, one of its workers."""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

import uvloop

from dsec.env_runtime import supervisor, worker
from dsec.env_runtime.settings import EnvRuntimeSettings
from dsec.platform import virtual
from dsec.platform.settings import configure_logging

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Start what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m dsec.env_runtime", description=__doc__)
    parser.add_argument("--worker", help="run as this worker (started by the supervisor)")
    parser.add_argument("--slot", type=Path, help="the worker's shared memory")
    parser.add_argument("--parent", type=int, help="the supervisor's pid; without it, it ends")
    parser.add_argument("--isolated", action="store_true", help="one session at a time")
    arguments = parser.parse_args()
    settings = EnvRuntimeSettings()
    if arguments.worker is None:
        configure_logging("env-runtime", settings.log_level)
        uvloop.run(supervisor.serve(settings))
        return 0
    configure_logging(arguments.worker, settings.log_level)
    _bound_by_parent(settings.worker_memory_bytes_max)
    if arguments.parent is not None and os.getppid() != arguments.parent:
        return 0  # it died before it could be bound to
    virtual.install()
    return uvloop.run(
        worker.serve(
            arguments.worker, arguments.slot, isolated=arguments.isolated, settings=settings
        )
    )


def _bound_by_parent(memory_bytes_max: int) -> None:
    """Die with the supervisor, and get no more memory than the node allows."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes_max, memory_bytes_max))


if __name__ == "__main__":
    sys.exit(main())
