"""What the embedded stack says when it cannot go on.

People meet these sentences at a terminal, with no stack trace and no source at hand. So each is
one sentence that says what failed, where, and what to do about it, and the translation of the
operating system's errors is kept in this one place.
"""

from __future__ import annotations

import errno
from pathlib import Path

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
NOT_WRITABLE_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
DISK_FULL_TEXT = "No space left on device"


class StackError(Exception):
    """The stack cannot start or go on: one plain sentence says what, where and what to do."""


def disk_full(path: Path, action: str) -> StackError:
    """Say that `action` failed because the disk that holds `path` is full."""
    return StackError(
        f"The disk that holds {path} is full, so {action} failed: "
        "free some space there and start again; nothing has to be cleaned up by hand."
    )


def os_failure(path: Path, action: str, error: OSError) -> StackError:
    """Turn an error of the operating system at `path` into a sentence."""
    if error.errno in DISK_FULL_ERRNOS:
        return disk_full(path, action)
    reason = error.strerror or str(error)
    if error.errno in NOT_WRITABLE_ERRNOS:
        return StackError(
            f"This user may not write to {path} ({reason}), so {action} failed: "
            "change its owner or its mode, or choose another state directory (DSEC_STATE_DIR)."
        )
    return StackError(
        f"The path {path} cannot be used ({reason}), so {action} failed: "
        "look at the path, or choose another state directory (DSEC_STATE_DIR)."
    )
