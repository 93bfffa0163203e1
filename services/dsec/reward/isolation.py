"""The service's side of the scoring process: keeps one, watches it, settles what it did not.

The rules, for rows whose functions misbehave:

* A row that takes longer than the deadline has the process killed; it is `reward_deadline`.
* A row at which the process dies is tried once more, alone and in a new process, since a process
  may die for reasons of the machine's; at the second death it is `reward_crashed`.
* All other rows of the message are scored as if nothing had happened, in the new process: functions
  depend on their transition alone, so scoring a row twice changes nothing.
* A spec with `FAULTS_MAX` such rows in a row rests for `FAULT_REST_S`, or a thousand sessions of
  one broken function would keep all others waiting for a deadline each. Only a row that was tried
  can be at fault: those that were not are `Untried`, and their lane asks for them again.

What functions print comes through here: it is bounded, and the service's secrets are hidden, which
the process itself does not have.

The service itself neither hangs nor restarts, and a message that was half done when *the service*
died needs no special care on redelivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import sys
import tempfile
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from functools import partial

from dsec.platform.bounded import Bounded
from dsec.platform.child_pipes import frame, received_body
from dsec.platform.hearing import Hearing
from dsec.platform.said import Said
from dsec.platform.secrets import all_secrets
from dsec.platform.user_environment import of_sessions
from dsec.platform.user_limits import UserLimits, kill_group, watch_processes
from dsec.reward.effects import Lost
from dsec.reward.frames import (
    FRAME_BYTES_MAX,
    READY,
    Failure,
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
FAULTS_MAX = 3
FAULT_REST_S = 60.0
ROW_DEATHS_MAX = 2


class Untried(bytes):
    """In place of the outcome of a row that was not tried: neither a reward nor a notice.

    The message is not asked for again: the rows beside this one get their rewards now, under ids
    that are made from the message's, and what a second delivery published under the same ids would
    be dropped by the bus as a duplicate. The lane asks again for what was not answered in time,
    under an id of its own.
    """


class ScoringUnavailable(Exception):
    """No scoring process can be started: the machine's trouble, not the function's."""


class _Gone(Exception):
    """The scoring process ended, at this row of the request; None: at none of them."""

    def __init__(self, row: int | None, stuck: bool) -> None:
        self.row = row
        self.stuck = stuck


class _Process:
    """One scoring process, from its start to its death."""

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
    async def start(cls, limits: UserLimits, said: Said, *, watches_state: bool) -> _Process:
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
            _Gone: the process died on the way, or had to be killed.
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
            raise _Gone(row if 0 <= row < len(tasks) else None, self._stuck) from error
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


class Isolation:
    """Scores rows in a scoring process, whatever the functions do."""

    def __init__(
        self, deadline_s: float, limits: UserLimits, *, watches_state: bool = False
    ) -> None:
        """Prepare; no process is started.

        Args:
            watches_state: the process says what changes between calls (`changed`).
        """
        self._deadline_s = deadline_s
        self._limits = limits
        self._watches_state = watches_state
        self._said = Said(all_secrets(os.environ), partial(os.write, 2))
        self._process: _Process | None = None
        self.changed: dict[str, list[str]] = {}
        """By spec, what of its function's past changed in the process that scored last."""
        self._faults: Bounded[str, tuple[int, float, Failure]] = Bounded(SPECS_MAX)

    async def close(self) -> None:
        """End the scoring process."""
        if self._process is not None:
            await self._process.kill()
            self._process = None

    async def score(self, tasks: Sequence[Task], contents: Mapping[str, bytes]) -> list[Outcome]:
        """The outcome of every row.

        Args:
            contents: the content of every spec that the rows name.

        Raises:
            ScoringUnavailable: no process could be started.
        """
        outcomes: list[Outcome | None] = [_lost(task) for task in tasks]
        deaths: dict[int, int] = {}
        groups = deque([[n for n, outcome in enumerate(outcomes) if outcome is None]])
        while groups:
            group = self._awake(groups.popleft(), tasks)
            if not group:
                continue
            try:
                found = await self._attempt([tasks[n] for n in group], contents)
            except _Gone as gone:
                groups.extendleft(reversed(self._after(gone, group, tasks, outcomes, deaths)))
                continue
            for n, outcome in zip(group, found, strict=True):
                outcomes[n] = outcome
                if deaths.get(n) is None:
                    self._faults.pop(tasks[n].spec, None)
        if untried := outcomes.count(None):
            log.warning("%d of %d rows not tried: their specs rest", untried, len(outcomes))
        return [Untried() if outcome is None else outcome for outcome in outcomes]

    async def _attempt(self, tasks: Sequence[Task], contents: Mapping[str, bytes]) -> list[Outcome]:
        if self._process is None:
            self._process = await _Process.start(
                self._limits, self._said, watches_state=self._watches_state
            )
        try:
            outcomes = await self._process.score(tasks, contents, self._deadline_s)
            self.changed = self._process.changed
            return outcomes
        except BaseException:
            # Cancelled in the middle, its next reply would be the wrong one.
            process, self._process = self._process, None
            await process.kill()
            raise

    def _after(
        self,
        gone: _Gone,
        group: list[int],
        tasks: Sequence[Task],
        outcomes: list[Outcome | None],
        deaths: dict[int, int],
    ) -> list[list[int]]:
        """The groups to score next, after the process died at a row of `group`."""
        if gone.row is None and len(group) > 1:
            # Nobody knows at which: halves lead there.
            middle = len(group) // 2
            return [group[:middle], group[middle:]]
        row = group[gone.row or 0]
        rest = [n for n in group if n != row]
        deaths[row] = deaths.get(row, 0) + 1
        if gone.stuck:
            outcomes[row] = self._fault(
                tasks[row].spec,
                Failure(
                    "reward_deadline",
                    f"the reward function took longer than {self._deadline_s:g} s",
                ),
            )
        elif deaths[row] >= ROW_DEATHS_MAX:
            outcomes[row] = self._fault(
                tasks[row].spec, Failure("reward_crashed", "the reward function ends its process")
            )
        else:
            return [rest, [row]]
        return [rest]

    def _fault(self, spec: str, failure: Failure) -> Failure:
        count = self._faults.get(spec, (0, 0.0, failure))[0] + 1
        log.error("reward spec %s: %s (%d in a row)", spec, failure.code, count)
        self._faults.remember(spec, (count, asyncio.get_running_loop().time(), failure))
        return failure

    def _awake(self, group: list[int], tasks: Sequence[Task]) -> list[int]:
        """The rows to try now: those whose specs do not rest."""
        if not self._faults:
            return group
        now = asyncio.get_running_loop().time()
        for spec, (count, since, failure) in list(self._faults.items()):
            if count >= FAULTS_MAX and now - since >= FAULT_REST_S:
                del self._faults[spec]
                log.info("reward spec %s is tried again, after %s", spec, failure.code)
        resting = {spec for spec, (count, _, _) in self._faults.items() if count >= FAULTS_MAX}
        return [n for n in group if tasks[n].spec not in resting]


def _lost(task: Task) -> Failure | None:
    """Why a row cannot be scored by anybody: a blob that it needs is gone."""
    for observation in (task.observation, task.next_observation):
        if type(observation) is Lost:
            return Failure("blob_not_found", observation.decode())
    return None
