"""Looks at a stack from outside, and takes it down: `dsec status` and `dsec down`.

Neither needs the supervisor to be well. What runs is found by asking the system about every
recorded process, never by believing the record.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from dsec.platform.stack.errors import StackError
from dsec.platform.stack.identity import wait_gone
from dsec.platform.stack.room import full_disk
from dsec.platform.stack.state import (
    Endpoints,
    ProcessRecord,
    StackRecord,
    StateDir,
)

KILL_WAIT_S = 10.0


@dataclass(frozen=True)
class ProcessStatus:
    """One process that the stack started. `since` is in seconds since 1970."""

    name: str
    pid: int
    since: float
    log_path: str
    alive: bool


@dataclass(frozen=True)
class StackStatus:
    """What is there. `half`: some of it runs and some does not. `problem` says what is odd."""

    state: Literal["running", "stopped", "half"]
    state_dir: Path
    supervisor: ProcessStatus | None
    endpoints: Endpoints | None
    processes: tuple[ProcessStatus, ...]
    problem: str | None

    @property
    def since(self) -> float | None:
        """When the supervisor was started, in seconds since 1970."""
        return self.supervisor.since if self.supervisor is not None else None


@dataclass(frozen=True)
class StopResult:
    """What `down` found and did. `killed`: the supervisor did not stop in time."""

    was_running: bool
    killed: bool
    ended_leftovers: tuple[str, ...]
    note: str | None = None
    """What could not be written down. What ran is ended all the same."""


def stack_status(state_dir: Path) -> StackStatus:
    """The state of the stack on this directory. Changes nothing and needs no lock."""
    state = StateDir(state_dir)
    record, problem = state.read()
    record = record or StackRecord()
    supervisor = _status(record.supervisor) if record.supervisor is not None else None
    processes = tuple(_status(process) for process in record.processes)
    everything = (*processes, *((supervisor,) if supervisor is not None else ()))
    if not any(process.alive for process in everything):
        verdict: Literal["running", "stopped", "half"] = "stopped"
    elif supervisor is not None and all(process.alive for process in everything):
        verdict = "running"
    else:
        verdict = "half"
    return StackStatus(
        state=verdict,
        state_dir=state.path,
        supervisor=supervisor,
        endpoints=record.endpoints,
        processes=processes,
        problem=problem or _full(verdict, state) or _oddity(verdict, supervisor, processes),
    )


def _full(verdict: str, state: StateDir) -> str | None:
    """Before anything else that is odd: it is why."""
    return None if verdict == "stopped" else full_disk(state.path)


def _status(record: ProcessRecord) -> ProcessStatus:
    return ProcessStatus(
        name=record.name,
        pid=record.pid,
        since=record.create_time,
        log_path=record.log_path,
        alive=record.identity.is_alive(),
    )


def _oddity(
    verdict: str, supervisor: ProcessStatus | None, processes: tuple[ProcessStatus, ...]
) -> str | None:
    if verdict == "half":
        dead = ", ".join(process.name for process in processes if not process.alive)
        if supervisor is not None and supervisor.alive:
            return f"Not running at this moment: {dead}; the supervisor starts them again."
        return "The supervisor is gone but left processes: `dsec down` or `dsec up` ends them."
    if verdict == "stopped" and supervisor is not None:
        return "The last run was not stopped in order: `dsec up` starts from what it left."
    return None


async def stop_stack(state_dir: Path, timeout_s: float) -> StopResult:
    """Ask the supervisor to stop, kill it after `timeout_s`, and end what is left of its own."""
    state = StateDir(state_dir)
    if not state.path.is_dir():
        return StopResult(was_running=False, killed=False, ended_leftovers=())
    record, _ = state.read()
    supervisor = record.supervisor if record is not None else None
    was_running = killed = False
    if supervisor is not None and (process := supervisor.identity.find()) is not None:
        was_running = True
        try:
            process.send_signal(signal.SIGTERM)
        except psutil.AccessDenied:
            raise StackError(
                f"The stack on {state.path} belongs to another user (process {supervisor.pid}), "
                "who has to stop it."
            ) from None
        except psutil.NoSuchProcess:
            pass  # it has ended meanwhile, as it should
        if not await wait_gone(supervisor.identity, timeout_s):
            killed = True
            with contextlib.suppress(psutil.Error):
                process.kill()
            await wait_gone(supervisor.identity, KILL_WAIT_S)
    ended, note = await _clean_up(state)
    return StopResult(was_running, killed, ended, note)


async def _clean_up(state: StateDir) -> tuple[tuple[str, ...], str | None]:
    # A full disk must not keep anybody from stopping a stack, so nothing is written before the
    # processes are ended.
    state.lock()
    note = None
    try:
        record, _ = state.read()
        ended = await state.end_leftovers(record)
        if record is not None and (record.supervisor is not None or record.processes):
            try:
                state.write(StackRecord(ports=record.ports))
            except StackError as error:
                note = str(error)
    finally:
        state.close()
    return ended, note
