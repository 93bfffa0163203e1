"""Why a worker died, and whose code was running: a judgement on what is left of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from dsec.env_runtime.running import EXIT_FENCED, EXIT_OUT_OF_MEMORY, Running, Starter
from dsec_contracts.worker import Culprit, DeathReason


@dataclass(frozen=True, slots=True)
class Death:
    """Why a worker died, and whose code was running."""

    reason: DeathReason
    culprit: Culprit | None
    detail: str


def judge(
    code: int,
    running: Running | None,
    killed_for: DeathReason | None,
    *,
    out_of_memory: bool,
    starter: Starter | None = None,
) -> Death | None:
    """What an exit code and the shared memory say. None: nothing to report.

    Args:
        code: as `asyncio` gives it, negative for a signal.
        killed_for: why the supervisor killed the worker, if it did.
        out_of_memory: the worker said so, or the system killed somebody for memory meanwhile.
        starter: whose code has started a process in this worker, whoever's ran at the end.
    """
    if code == EXIT_FENCED:
        return None
    # No crash is a SIGKILL, and user code is kept from sending it: an operator did, or a machine
    # that is taken away. But what user code has started can, and nobody says who did.
    outside = code == -signal.SIGKILL and killed_for is None and not out_of_memory
    blamed: Running | Starter | None = running
    if outside and starter is not None:
        is_its_own = running is not None and running.session_id == starter.session_id
        blamed = running if is_its_own else starter
    culprit = (
        None
        if blamed is None
        else Culprit(session_id=blamed.session_id, step=blamed.step, suspect_only=outside or None)
    )
    if killed_for is not None:
        return Death(killed_for, culprit, f"killed: {killed_for}")
    if out_of_memory or code == EXIT_OUT_OF_MEMORY:
        return Death("oom", culprit, "no more memory")
    if code < 0:
        return Death("signal", culprit, f"signal {signal.Signals(-code).name}")
    if code == 0 and running is None:
        return Death("drained", None, "stopped in good order")
    return Death("exit", culprit, f"exit code {code}")
