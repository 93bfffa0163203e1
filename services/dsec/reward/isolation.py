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
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from dsec.platform.bounded import Bounded
from dsec.platform.said import Said
from dsec.platform.secrets import all_secrets
from dsec.platform.user_limits import UserLimits
from dsec.reward.effects import Lost
from dsec.reward.frames import Failure, Outcome, Task
from dsec.reward.scorer import SPECS_MAX, Gone, Scorer

log = logging.getLogger(__name__)

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
        self._process: Scorer | None = None
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
            except Gone as gone:
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
            self._process = await Scorer.start(
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
        gone: Gone,
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
