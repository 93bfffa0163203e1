"""Small files of the state directory: private to the user, and whole or not there at all.

A supervisor may be killed and a disk may fill between any two bytes. So a file is written beside
its place, synced, and then renamed over it; a reader sees the old one or the new one.
"""

from __future__ import annotations

import os
from pathlib import Path

from dsec.platform.stack.errors import os_failure


def write_private(path: Path, text: str) -> None:
    """Replace the file atomically, readable by its owner alone; StackError when that fails."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        try:
            _write_synced(draft, text)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise os_failure(path, f"writing {path.name}", error) from error


def _write_synced(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
