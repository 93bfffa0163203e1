"""How much memory a worker has: what it says of itself, and what its supervisor holds it to."""

from __future__ import annotations

import psutil


def resident_bytes(pid: int | None = None) -> int | None:
    """The resident memory of a process, by default of this one. None: it cannot be said now."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):  # it has ended, or user code holds every file it may open
        return None
