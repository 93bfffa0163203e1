"""How a service hears what a process of user code prints, without giving it the log's descriptor.

The other end is the process's standard error, and of whatever it starts: when it is gone they may
have it still, so nothing waits for the end of what is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from dsec.platform.said import Said

HEARD_BYTES = 1 << 16
LAST_WORDS_BYTES_MAX = 1 << 20
"""Of a process that is gone; what it has started may go on talking."""
FULL_PAUSE_S = 0.01
"""Between two reads once nothing more is told: who prints without end is slowed down, or the
service would do nothing but read."""


class Hearing:
    """Hears a child of an event loop's process, which never has a hand on the log itself. The
    child is to be started with `end` as standard error."""

    def __init__(self, said: Said) -> None:
        self._said = said
        self._loop = asyncio.get_running_loop()
        self._heard, self.end = os.pipe()
        os.set_blocking(self._heard, False)

    def begin(self) -> None:
        """Listen. The child has its end by now, and nobody else needs it."""
        self._close_end()
        self._listen()

    def _listen(self) -> None:
        if self._heard >= 0:
            self._loop.add_reader(self._heard, self._hear)

    def close(self) -> None:
        """Hear what is left, and no more. Safe to repeat."""
        self._close_end()
        if self._heard < 0:
            return
        left = LAST_WORDS_BYTES_MAX
        while left > 0 and (count := self._hear()):
            left -= count
        self._loop.remove_reader(self._heard)
        os.close(self._heard)
        self._heard = -1
        self._said.hear(b"")

    def _hear(self) -> int:
        with contextlib.suppress(BlockingIOError):
            if part := os.read(self._heard, HEARD_BYTES):
                self._said.hear(part)
                if self._said.is_full:
                    self._loop.remove_reader(self._heard)
                    self._loop.call_later(FULL_PAUSE_S, self._listen)
                return len(part)
            self._loop.remove_reader(self._heard)  # all who had the other end are gone
        return 0

    def _close_end(self) -> None:
        if self.end >= 0:
            os.close(self.end)
            self.end = -1
