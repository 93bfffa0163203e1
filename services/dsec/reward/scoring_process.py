"""The scoring process: where users' reward functions run (`python -m dsec.reward.scoring_process`).

A function may block for ever, call `os._exit`, exhaust memory or crash in compiled code, at the
first attempt or at a later one. So none runs in the service itself: this disposable process reads
rows from a pipe and writes outcomes to another, and before each row it notes the row's number in
memory that it shares with the service, which therefore knows at whose step it hung or died.

It holds no connection and is handed no address of any server. That is protection against mistakes,
not against malice.
"""

from __future__ import annotations

import argparse
import mmap
import os
import struct
from typing import BinaryIO

from dsec.platform import virtual
from dsec.platform.child_pipes import bind, frame, own_pipes, read_body, write_frame
from dsec.platform.copies import end_if_copy
from dsec.platform.interposition import interposition_of
from dsec.platform.user_limits import UserLimits
from dsec.reward.frames import (
    FRAME_BYTES_MAX,
    READY,
    Failure,
    Needs,
    Outcome,
    Task,
    read_request,
    reply,
)
from dsec.reward.score import Asks, FunctionScorer, RewardError, Scorer, load_scorer
from dsec.reward.state import Snapshot, changed, snapshot

PROGRESS = struct.Struct("<q")
NO_ROW = -1
"""Before the first row and behind the last one."""


class Scorers:
    """The specs that are loaded. The service says which: it knows what is in use."""

    def __init__(self, *, watches_state: bool = False) -> None:
        """None is loaded.

        Args:
            watches_state: note what each function's past looks like before its first row.
        """
        self._watches_state = watches_state
        self._before: dict[str, Snapshot] = {}
        self._content: dict[str, bytes] = {}
        self._loaded: dict[str, Scorer | Failure] = {}

    def add(self, specs: dict[str, bytes]) -> None:
        """Know these from now on. They are loaded at their first row, so that a spec whose import
        hangs is found at that row."""
        self._content |= specs

    def drop(self, spec: str) -> None:
        """Forget one."""
        self._content.pop(spec, None)
        scorer = self._loaded.pop(spec, None)
        if isinstance(scorer, Scorer):
            scorer.unload()

    def score(self, task: Task) -> Outcome:
        """The outcome of one row."""
        scorer = self._loaded.get(task.spec)
        if scorer is None:
            scorer = self._loaded[task.spec] = self._load(task.spec)
        if isinstance(scorer, Failure):
            return scorer
        try:
            given = task.fact, task.observation, task.next_observation, task.responses
            return scorer.score(*given).body()
        except Asks as asks:
            return Needs(asks.requests)
        except RewardError as error:
            return Failure(error.code, error.message)

    def changed(self) -> dict[str, list[str]]:
        """By spec, what of its function's past is not as it was before its first row."""
        found = {}
        for spec, before in self._before.items():
            scorer = self._loaded[spec]
            if isinstance(scorer, FunctionScorer):
                found[spec] = changed(before, snapshot(scorer.function, scorer.namespace))
        return {spec: names for spec, names in found.items() if names}

    def _load(self, spec: str) -> Scorer | Failure:
        try:
            scorer = load_scorer(spec, self._content[spec], interposition_of)
        except RewardError as error:
            return Failure(error.code, error.message)
        if self._watches_state and isinstance(scorer, FunctionScorer):
            self._before[spec] = snapshot(scorer.function, scorer.namespace)
        return scorer


def serve(
    requests: BinaryIO, replies: BinaryIO, progress: mmap.mmap, *, watches_state: bool
) -> None:
    """Score what comes until the other side closes the pipe."""
    scorers, own_pid = Scorers(watches_state=watches_state), os.getpid()
    write_frame(replies, frame(READY, FRAME_BYTES_MAX))
    while (body := read_body(requests)) is not None:
        drop, specs, tasks = read_request(body)
        for spec in drop:
            scorers.drop(spec)
        scorers.add(specs)
        outcomes = []
        for n, task in enumerate(tasks):
            PROGRESS.pack_into(progress, 0, n)
            outcomes.append(scorers.score(task))
            end_if_copy(own_pid)  # before it notes another row, or answers
        PROGRESS.pack_into(progress, 0, NO_ROW)
        write_frame(replies, frame(reply(outcomes, scorers.changed()), FRAME_BYTES_MAX))


def main() -> None:
    """Run until the service closes the pipe, or dies."""
    parser = argparse.ArgumentParser(prog="python -m dsec.reward.scoring_process")
    parser.add_argument("--progress-fd", type=int, required=True)
    parser.add_argument("--limits", type=UserLimits.from_argument, required=True)
    parser.add_argument("--watches-state", action="store_true")
    arguments = parser.parse_args()
    bind(arguments.limits)
    requests, replies = own_pipes()
    progress = mmap.mmap(arguments.progress_fd, PROGRESS.size)
    virtual.install()
    serve(requests, replies, progress, watches_state=arguments.watches_state)


if __name__ == "__main__":
    main()
