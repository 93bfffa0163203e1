"""One scoring process, as the service holds it: from its start to its death.

It is given rows and a deadline for each of them. It answers all of them, or it is `Gone`; what
becomes of its rows then is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from dsec.platform.child_pipes import frame, received_body
from dsec.platform.hearing import Hearing
from dsec.platform.said import Said
from dsec.platform.user_environment import of_sessions
from dsec.platform.user_limits import UserLimits, kill_group, watch_processes
from dsec.reward.frames import (
    FRAME_BYTES_MAX,
    READY,
    Outcome,
    Task,
    read_changed,
    read_reply,
    request,
)
from dsec.reward.scoring_process import NO_ROW, PROGRESS

log = logging.getLogger(__name__)

START_WAIT_S_MAX = 30.0
WATCH_SLICES = 10
"""The deadline is counted in slices that this process itself was awake for: a machine that stood
still for a minute is nobody's fault."""
SPECS_MAX = 256
"""That one process knows at a time."""


class ScoringUnavailable(Exception):
    """No scoring process can be started: the machine's trouble, not the function's."""


class Gone(Exception):
    """The scoring process ended, at this row of the request; None: at none of them."""

    def __init__(self, row: int | None, stuck: bool) -> None:
        self.row = row
        self.stuck = stuck


class Scorer:
    """The process.

    `specs`: those that it knows, the last used one last. `changed`: by spec, what of its function's
    past changed while it answered last.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        progress: mmap.mmap,
        processes_max: int,
        hearing: Hearing,
    ) -> None:
        self._process = process
        self._hearing = hearing
        self._processes_max = processes_max
        self._progress = progress
        self._stuck = False
        self.changed: dict[str, list[str]] = {}
        self.specs: OrderedDict[str, None] = OrderedDict()

    @classmethod
    async def start(cls, limits: UserLimits, said: Said, *, watches_state: bool) -> Scorer:
        """Start one and wait until it is ready. `said`: takes what it prints."""
        with tempfile.TemporaryFile() as file, contextlib.ExitStack() as undo:
            hearing = Hearing(said)
            undo.callback(hearing.close)
            file.truncate(PROGRESS.size)
            progress = mmap.mmap(file.fileno(), PROGRESS.size)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dsec.reward.scoring_process",
                f"--progress-fd={file.fileno()}",
                f"--limits={limits.argument()}",
                *(["--watches-state"] if watches_state else []),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=hearing.end,
                pass_fds=(file.fileno(),),
                # As whoever verifies has it: sums of many threads have other bits.
                env=of_sessions(os.environ),
                start_new_session=True,
                limit=1 << 20,
            )
            undo.pop_all()
        hearing.begin()
        started = cls(process, progress, limits.processes_max, hearing)
        try:
            async with asyncio.timeout(START_WAIT_S_MAX):
                ready = await started._read()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await started.kill()
            raise ScoringUnavailable(f"the scoring process did not start: {error!r}") from error
        if ready != READY:
            await started.kill()
            raise ScoringUnavailable("the scoring process did not say that it is ready")
        return started

    async def score(
        self, tasks: Sequence[Task], contents: Mapping[str, bytes], deadline_s: float
    ) -> list[Outcome]:
        """The outcomes of rows.

        Raises:
            Gone: the process died on the way, or had to be killed.
        """
        send, drop = self._introduce(tasks, contents)
        PROGRESS.pack_into(self._progress, 0, NO_ROW)
        count = watch_processes(self._process.pid, self._processes_max, self._kill_group)
        watches = [asyncio.create_task(watch) for watch in (self._watch(deadline_s), count)]
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(frame(request(tasks, send, drop), FRAME_BYTES_MAX))
            await self._process.stdin.drain()
            body = await self._read()
            outcomes = read_reply(body, len(tasks))
            self.changed = read_changed(body)
            return outcomes
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            row = PROGRESS.unpack_from(self._progress, 0)[0]
            log.warning("the scoring process is gone: %r", error)
            await self.kill()
            raise Gone(row if 0 <= row < len(tasks) else None, self._stuck) from error
        finally:
            for watch in watches:
                watch.cancel()

    def _introduce(
        self, tasks: Sequence[Task], contents: Mapping[str, bytes]
    ) -> tuple[dict[str, bytes], list[str]]:
        """The specs that the process does not know yet, and those that it should forget."""
        needed = dict.fromkeys(task.spec for task in tasks)
        send = {spec: contents[spec] for spec in needed if spec not in self.specs}
        for spec in needed:
            self.specs[spec] = None
            self.specs.move_to_end(spec)
        drop = []
        while len(self.specs) > max(SPECS_MAX, len(needed)):
            drop.append(self.specs.popitem(last=False)[0])
        return send, drop

    async def _read(self) -> bytes:
        assert self._process.stdout is not None
        return await received_body(self._process.stdout, FRAME_BYTES_MAX)

    async def _watch(self, deadline_s: float) -> None:
        """Kill the process once it has been at one row for the deadline."""
        at, slices = NO_ROW, 0
        while True:
            await asyncio.sleep(deadline_s / WATCH_SLICES)
            row = PROGRESS.unpack_from(self._progress, 0)[0]
            at, slices = row, slices + 1 if row == at else 0
            if slices >= WATCH_SLICES:
                self._stuck = True
                self._kill_group()

    async def kill(self) -> None:
        """End it, and whatever it started."""
        self._kill_group()
        try:
            await self._process.wait()
        finally:
            self._hearing.close()

    def _kill_group(self) -> None:
        kill_group(self._process.pid)
