"""Whether the disk of a stack is full. Its servers then wait for room, and so does whoever waits
for them: they answer nothing that says why."""

from __future__ import annotations

import shutil
from pathlib import Path

FULL_BYTES = 4 << 20
"""With less than this free, a database has no room for its next segment."""


def full_disk(path: Path) -> str | None:
    """A sentence where the disk that holds `path` is full, else None."""
    try:
        free_bytes = shutil.disk_usage(path).free
    except OSError:
        return None  # what is not there is told elsewhere
    if free_bytes >= FULL_BYTES:
        return None
    return (
        f"The disk that holds {path} is full ({free_bytes >> 20} MB free), so nothing can be "
        "recorded and sessions wait: free some space there, and they go on by themselves."
    )
