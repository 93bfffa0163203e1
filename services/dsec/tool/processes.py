"""The service's side of calling processes: starts them, keeps them warm, ends them at a deadline.

A process makes one call at a time and belongs to one tool. After a call it is kept for the next one
of its tool, up to a bound; after a deadline or a death nobody knows what state it is in, and it is
not used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dsec.platform.child_pipes import frame, received_body
from dsec.platform.user_environment import without_secrets
from dsec.platform.user_limits import UserLimits, kill_group, watch_processes
from dsec.tool.frames import (
    FRAME_BYTES_MAX,
    READY,
    Failure,
    Order,
    Outcome,
    read_reply,
)
from dsec_contracts.canonical import encode

log = logging.getLogger(__name__)

START_WAIT_S_MAX = 30.0
END_WAIT_S_MAX = 10.0
"""How long a process is waited for that is told to end with all that it has started."""


class CallingUnavailable(Exception):
    """No calling process can be started: the machine's trouble, not the tool's."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a process is given of its tool."""

    spec_hash: str
    content: bytes
    secrets: Mapping[str, str]


class CallingProcess:
    """One calling process, from its start to its death."""

    def __init__(self, process: asyncio.subprocess.Process, spec_hash: str) -> None:
        self._process = process
        self.spec_hash = spec_hash

    @classmethod
    async def start(cls, program: Program, limits: UserLimits) -> CallingProcess:
        """Start one and wait until it is ready.

        Raises:
            CallingUnavailable: it cannot be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dsec.tool.calling_process",
                f"--limits={limits.argument()}",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=without_secrets(os.environ),
                start_new_session=True,
                limit=1 << 20,
            )
        except OSError as error:
            raise CallingUnavailable(f"no calling process can be started: {error}") from error
        started = cls(process, program.spec_hash)
        whole = [program.spec_hash, program.content, dict(program.secrets)]
        try:
            async with asyncio.timeout(START_WAIT_S_MAX):
                if await started._ask(encode(whole)) != READY:
                    raise ConnectionError("it did not say that it is ready")
        except BaseException as error:
            await started.kill()
            if isinstance(error, (TimeoutError, asyncio.IncompleteReadError, ConnectionError)):
                raise CallingUnavailable(f"a calling process did not start: {error!r}") from error
            raise
        return started

    async def call(self, order: Order) -> tuple[Outcome, bool]:
        """The outcome of a call, and whether the process must not be used again.

        Raises:
            ConnectionError, asyncio.IncompleteReadError, ValueError: the process is gone, or what
                it says is no reply.
        """
        return read_reply(await self._ask(encode(list(order))))

    async def _ask(self, body: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(frame(body, FRAME_BYTES_MAX))
        await self._process.stdin.drain()
        return await received_body(self._process.stdout, FRAME_BYTES_MAX)

    async def watch(self, processes_max: int) -> None:
        """Until cancelled, end it when it has started too many others."""
        itself = 1  # below its keeper
        await watch_processes(self._process.pid, processes_max + itself, self._end)

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def kill(self) -> None:
        """End it, and whatever it started."""
        self._end()
        try:
            async with asyncio.timeout(END_WAIT_S_MAX):
                await self._process.wait()
        except TimeoutError:
            log.error("the keeper of a calling process does not end: it is killed")
            kill_group(self._process.pid)
        await self._process.wait()

    async def stop(self, wait_s: float) -> None:
        """End it, but let it first tell a server of its tool's that nobody waits any more."""
        assert self._process.stdin is not None
        if wait_s > 0:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):  # it is killed
                async with asyncio.timeout(wait_s):
                    await self._process.wait()
        await self.kill()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()


class Processes:
    """Calling processes: those at work, and idle ones that wait for the next call."""

    def __init__(self, limits: UserLimits, idle_max: int) -> None:
        self._limits = limits
        self._idle_max = idle_max
        self._idle: deque[CallingProcess] = deque()

    async def take(self, program: Program) -> CallingProcess:
        """A process for a call of a tool.

        Raises:
            CallingUnavailable: none is idle, and none can be started.
        """
        for process in list(self._idle):
            if process.spec_hash == program.spec_hash:
                self._idle.remove(process)
                if process.alive:
                    return process
                await process.kill()
        return await CallingProcess.start(program, self._limits)

    async def call(
        self, process: CallingProcess, order: Order, deadline_s: float, stop_s: float = 0.0
    ) -> Outcome:
        """Have a process that was taken make a call. It is this pool's again afterwards.

        Args:
            stop_s: how long it may take to end, when its call is given up: at its deadline, or
                because it is cancelled.
        """
        watch = asyncio.create_task(process.watch(self._limits.processes_max))
        try:
            async with asyncio.timeout(deadline_s):
                outcome, spent = await process.call(order)
        except TimeoutError:
            await process.stop(stop_s)
            return Failure("deadline", f"the call took longer than {deadline_s:g} s")
        except (ConnectionError, asyncio.IncompleteReadError, ValueError) as error:
            log.warning("a calling process is gone: %r", error)
            await process.kill()
            return Failure("tool_crashed", "the tool ended the process that it ran in")
        except BaseException:  # cancelled in the middle: its next reply would be the wrong one
            await process.stop(stop_s)
            raise
        finally:
            watch.cancel()
        if spent:
            log.info("a tool has left threads or processes behind: they are ended")
            await process.kill()
        else:
            await self.give_back(process)
        return outcome

    async def give_back(self, process: CallingProcess) -> None:
        """Keep a process for later calls; the one idle for longest goes if there are too many."""
        self._idle.append(process)
        while len(self._idle) > self._idle_max:
            await self._idle.popleft().kill()

    async def close(self) -> None:
        """End the idle ones."""
        while self._idle:
            await self._idle.popleft().kill()
