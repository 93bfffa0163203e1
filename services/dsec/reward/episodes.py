"""Whole episodes, for the functions that score them: what a tick brings is the last step, and the
steps before it are read from the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from uuid import UUID

from dsec.platform.log import LogReader
from dsec.reward.batch import Batch
from dsec.reward.effects import Lost, resolved
from dsec.reward.frames import Failure, Task
from dsec.session.log_row import observation_behind
from dsec.session.whole_episode import EpisodeStep, pack_episode
from dsec_contracts import keys

EPISODE_BYTES_MAX = 256 << 20
"""Facts and observations of one episode. They are in memory twice while it is scored."""
EPISODES_A_TURN_MAX = 8
"""Episodes that are read and scored together."""


class Episodes:
    """Reads what rows close."""

    def __init__(self, log: LogReader, blobs: Callable[[str], bytes], wait_s: float) -> None:
        """Prepare.

        Args:
            blobs: gives observations that lie in the object store.
            wait_s: how long the log is waited for.
        """
        self._log = log
        self._blobs = blobs
        self._wait_s = wait_s

    async def task(self, batch: Batch, row: int, first: int, position: int) -> Task | Failure:
        """What a function is given for the episode that a row closes.

        Args:
            first: the first step of the episode.
            position: of the row's message. The recorder has all steps before it once it has that.

        Raises:
            LogBehind, LogUnavailable: nobody can say what the steps were.
        """
        [closing] = batch.tasks([row])
        session, last = UUID(bytes=batch.sessions[row]), batch.steps[row]
        await self._log.wait_floor(position, self._wait_s)
        before = keys.STARTED if first == 0 else keys.step(first - 1)
        named = [before, *map(keys.step, range(first, last))]
        found = {one.key: one for one in await self._log.keyed(session, named)}
        if len(found) < len(named):
            lacking = next(key for key in named if key not in found)
            return Failure("step_not_found", f"the log has no {lacking} of the session", False)
        steps, prior = list[EpisodeStep](), observation_behind(found[before])
        for key in named[1:]:
            one = found[key]
            steps.append(EpisodeStep(bytes(one.fact), prior, bytes(one.observation or b"")))
            prior = observation_behind(one)
        steps.append(EpisodeStep(closing.fact, prior, closing.next_observation))
        return await asyncio.to_thread(episode_task, closing.spec, steps, self._blobs)


def episode_task(
    spec: str, steps: Iterable[EpisodeStep], blobs: Callable[[str], bytes]
) -> Task | Failure:
    """The steps of an episode as one task. Blocks: large observations are fetched."""
    whole, size = list[EpisodeStep](), 0
    for recorded in steps:
        step = EpisodeStep(
            recorded.fact,
            resolved(recorded.observation, blobs),
            resolved(recorded.next_observation, blobs),
        )
        for observation in step[1:]:
            if isinstance(observation, Lost):
                return Failure("blob_not_found", observation.decode())
        whole.append(step)
        size += sum(map(len, step))
        if size > EPISODE_BYTES_MAX:
            told = f"the episode has more than {EPISODE_BYTES_MAX} bytes; score its steps instead"
            return Failure("episode_too_large", told)
    return Task(spec, pack_episode(whole), b"", b"")
