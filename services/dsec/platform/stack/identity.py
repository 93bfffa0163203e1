"""Who a process is: its pid together with the time it was created.

A pid alone is reused, after a reboot within minutes. Whatever the stack stops that it did not
fork itself a moment ago goes through here, so that it can never signal a stranger.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil
import tenacity

# The system derives creation times from its clock, so a small correction of the clock moves them.
CREATE_TIME_TOLERANCE_S = 2.0
GONE_POLL_S = 0.05


@dataclass(frozen=True)
class ProcessIdentity:
    """One process for all time. `create_time` is in seconds since 1970."""

    pid: int
    create_time: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The identity of a process that exists now (a zombie counts)."""
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The live process, or None when it ended or another one has its pid."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.create_time) <= CREATE_TIME_TOLERANCE_S
            # A zombie only waits to be reaped: it runs nothing and holds nothing.
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None

    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return self.find() is not None


def own_identity() -> ProcessIdentity:
    """The identity of the calling process."""
    return ProcessIdentity.of(os.getpid())


def descendants(identity: ProcessIdentity) -> Sequence[psutil.Process]:
    """Children, their children and so on, taken before the parent ends and they scatter."""
    process = identity.find()
    if process is None:
        return ()
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return ()


def kill_remaining(family: Iterable[psutil.Process]) -> None:
    """Kill those that still run; psutil itself checks that no pid was reused."""
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()


async def wait_gone(identity: ProcessIdentity, within_s: float) -> bool:
    """Wait until the process has ended; False when it has not within the bound."""
    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_delay(within_s),
        wait=tenacity.wait_fixed(GONE_POLL_S),
        retry=tenacity.retry_if_result(bool),
    )

    async def alive() -> bool:
        return identity.is_alive()

    try:
        await retrying(alive)
    except tenacity.RetryError:
        return False
    return True


async def end_process(identity: ProcessIdentity, sig: int, grace_s: float) -> bool:
    """End a process that may not be our child, and its descendants; True if it still ran."""
    process = identity.find()
    if process is None or identity.pid == os.getpid():
        return False
    family = descendants(identity)
    with contextlib.suppress(psutil.Error):
        process.send_signal(sig)
    if not await wait_gone(identity, grace_s):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
        await wait_gone(identity, grace_s)
    kill_remaining(family)
    return True
