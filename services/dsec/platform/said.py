"""What user code prints: told in the service's log, line by line, without secrets, and bounded.

Code that prints without end must not fill the disk of the service, and code that prints what it was
given, or has found, must not put a secret into a log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from dsec.platform.secrets import hidden

LINE_BYTES_MAX = 4096
"""The rest of a longer line is not told."""
PERIOD_S = 10.0
PERIOD_BYTES_MAX = 1 << 16
"""Of one tool's process, or of all reward functions of a replica, in each period."""
SECRET_LINE_CHARS_MIN = 8
"""Of a secret that has several lines those are hidden too that have so many characters."""
ESCAPED_BYTES_MAX = 12
"""What one character of a secret may be written as: an emoji in JSON."""
LEFT_OUT = b"(more was printed, and is left out)\n"


class Said:
    """What one process says, or one after the other."""

    def __init__(
        self,
        secrets: Mapping[str, str],
        write: Callable[[bytes], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secrets = dict(secrets)
        for name, secret in secrets.items():
            for n, line in enumerate(secret.splitlines()):
                if len(line) >= SECRET_LINE_CHARS_MIN:
                    self._secrets[f"{name}.{n}"] = line
        lengths = [len(secret) for secret in self._secrets.values()]
        self._longest = max(lengths, default=0) * ESCAPED_BYTES_MAX
        self._write = write
        self._clock = clock
        self._line = bytearray()
        self._since = clock()
        self._told = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more is told in this period."""
        return self._told > PERIOD_BYTES_MAX and self._clock() - self._since < PERIOD_S

    def hear(self, part: bytes) -> None:
        """Take what was said; empty: nothing follows."""
        if self.is_full and (end := part.rfind(b"\n")) >= 0:
            self._line.clear()  # whole lines cost nothing then
            part = part[end + 1 :]
            if not part:
                return
        *whole, rest = part.split(b"\n")
        for one in whole:
            self._add(one)
            self._tell()
        self._add(rest)
        if not part and self._line:
            self._tell()

    def _add(self, piece: bytes) -> None:
        # One byte more than is told, so that it can be told that it is not all.
        self._line += piece[: max(0, LINE_BYTES_MAX + 1 - len(self._line))]

    def _tell(self) -> None:
        line, self._line = bytes(self._line), bytearray()
        is_whole = len(line) <= LINE_BYTES_MAX
        line = hidden(line, self._secrets)
        if not is_whole:  # what it was cut in may be a secret
            line = line[: max(0, len(line) - self._longest)] + b"..."
        line += b"\n"
        if (now := self._clock()) - self._since >= PERIOD_S:
            self._since, self._told = now, 0
        if self._told <= PERIOD_BYTES_MAX:
            self._told += len(line)
            self._write(line if self._told <= PERIOD_BYTES_MAX else LEFT_OUT)
