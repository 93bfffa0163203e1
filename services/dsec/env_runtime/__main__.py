"""Composition root: a node's supervisor, or, with `--worker`, one of its workers.

A worker reads its settings from standard input: in the environment or among the arguments, user
code could read the passwords that are in them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from dsec.env_runtime.settings import EnvRuntimeSettings
from dsec.platform.parent import die_with_parent
from dsec.platform.settings import configure_logging

log = logging.getLogger(__name__)


def main() -> int:
    """Start what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m dsec.env_runtime", description=__doc__)
    parser.add_argument("--worker", help="run as this worker (started by the supervisor)")
    parser.add_argument("--slot", type=Path, help="the worker's shared memory")
    parser.add_argument("--parent", type=int, help="the supervisor's pid; without it, it ends")
    parser.add_argument("--isolated", action="store_true", help="one session at a time")
    arguments = parser.parse_args()
    if arguments.worker is None:
        settings = EnvRuntimeSettings()
        configure_logging("env-runtime", settings.log_level)
        # Here, and not above: the supervisor runs no session, and what runs them is half a second.
        from dsec.env_runtime import supervisor

        uvloop.run(supervisor.serve(settings))
        return 0
    die_with_parent()
    if arguments.parent is not None and os.getppid() != arguments.parent:
        return 0  # it died before it could be bound to
    from dsec.env_runtime import worker
    from dsec.platform import virtual

    settings = EnvRuntimeSettings.model_validate_json(sys.stdin.readline())
    configure_logging(arguments.worker, settings.log_level)
    settings.user_limits(settings.worker_memory_bytes_max).apply()
    virtual.install()
    work = worker.serve(
        arguments.worker, arguments.slot, isolated=arguments.isolated, settings=settings
    )
    try:
        uvloop.run(_to_the_end(work))  # does not return
    except BaseException:
        log.exception("the loop of a worker was stopped")
    logging.shutdown()
    os._exit(1)


async def _to_the_end(work: Coroutine[Any, Any, int]) -> None:
    """Work, and end the process there and then: threads that user code left behind, or what it did
    to the loop, must not keep a worker whose work is over."""
    try:
        code = await work
    except BaseException:
        log.exception("a worker falls")
        code = 1
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
