"""A server that a full disk has stopped, and that does not notice when there is room again.

A stream of nats-server that could not be written once refuses everything until the server is
started anew, while the process looks alive. What was acknowledged is on disk, so a new start costs
a second and loses nothing; but as long as the disk is full it would not even come up.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

ROOM_BYTES = 16 << 20
"""So much must fit before the server is started anew."""
READ_BYTES_MAX = 1 << 20
_SAID = re.compile(
    rb"critical write error|no space left on device|disk quota exceeded", re.IGNORECASE
)


class WriteErrors:
    """Reads what a server says in its log, and says when a new start would heal it."""

    def __init__(self, name: str, log_path: Path, directory: Path, first_words: bytes) -> None:
        """Args:
        first_words: what it says when it starts. What stands before that, another run said.
        """
        self._name = name
        self._first_words = first_words
        self._log_path = log_path
        self._directory = directory
        self._read_bytes = _size(log_path)
        self._failed = False

    def ailment(self) -> str | None:
        """A sentence where it failed to write and there is room now. Says it once a failure."""
        self._failed = self._failed or self._said_so()
        if not self._failed or not _has_room(self._directory):
            return None
        self._failed = False
        return (
            f"{self._name} could not write to {self._directory} and takes nothing since, though "
            "there is room now. It is started anew; nothing that it acknowledged is lost."
        )

    def _said_so(self) -> bool:
        size = _size(self._log_path)
        if size < self._read_bytes:  # a new log
            self._read_bytes = 0
        begin = max(self._read_bytes, size - READ_BYTES_MAX)
        self._read_bytes = size
        if begin == size:
            return False
        with self._log_path.open("rb") as log:
            log.seek(begin)
            said = log.read(size - begin).rpartition(self._first_words)[2]
        return _SAID.search(said) is not None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _has_room(directory: Path) -> bool:
    """Whether `ROOM_BYTES` fit, and as many again: others must not be left without while it is
    tried. It is tried, since what a system says is free knows of no quota."""
    try:
        if shutil.disk_usage(directory).free < 2 * ROOM_BYTES:
            return False
        with tempfile.TemporaryFile(dir=directory) as file:
            for _ in range(ROOM_BYTES >> 20):
                file.write(bytes(1 << 20))
            file.flush()
    except OSError:
        return False
    return True
