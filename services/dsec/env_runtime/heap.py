"""The worker's garbage collection: what lives as long as its session is not looked at again.

A full collection visits every object of every session, and nothing else runs meanwhile: the more
sessions, the longer every one of them waits. Those that have started are therefore put beyond the
collector's reach, a portion at a time. Most of an ended session goes when
nothing refers to it any more; for what refers to itself the collector is let in again once as many
sessions have ended as there are, so that the price of a full look is shared by all of these.
"""

from __future__ import annotations

import gc

FROZEN_EVERY_SESSIONS = 256
THAWED_SESSIONS_MIN = 1024
YOUNG_OBJECTS = 50_000
"""New containers between two looks at the youngest; the default, 700, is met within a tick."""


class Heap:
    """Counts sessions, and freezes and thaws what they hold."""

    def __init__(self) -> None:
        self._started = 0
        self._ended = 0

    def begin(self) -> None:
        """What the process holds now stays as long as it does."""
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, 20, 50)

    def started(self) -> None:
        """A session started."""
        self._started += 1
        if self._started >= FROZEN_EVERY_SESSIONS:
            self._started = 0
            gc.freeze()

    def ended(self, sessions: int) -> None:
        """A session ended; so many are left."""
        self._ended += 1
        if self._ended >= max(THAWED_SESSIONS_MIN, sessions):
            self._ended = 0
            gc.unfreeze()
