"""Proves that an object store does what blobs rely on: write, write once, read, delete.

Some stores answer "done" to a conditional write and overwrite all the same; a share may be mounted
for reading only. That has to be found out before anything is trusted to it.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

from dsec.platform.objects import ObjectStore, ObjectStoreError

PROOF_FOLDER = ".proof"
_FIRST, _SECOND = b"first", b"second"


class ProofFailed(Exception):
    """One of the steps did not do what it must; says which, and what happened."""

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"{step}: {reason}")
        self.step = step
        self.reason = reason


class Provable(Protocol):
    """What a store must be able to do. Names are the proof's own, and used once."""

    def write(self, name: str, data: bytes) -> None: ...
    def write_if_absent(self, name: str, data: bytes) -> bool:
        """Whether it was absent, and is now written."""
        ...

    def read(self, name: str) -> bytes | None:
        """None where there is nothing."""
        ...

    def delete(self, name: str) -> None: ...


class Directory:
    """A directory as a store."""

    def __init__(self, root: Path) -> None:
        self._folder = root / PROOF_FOLDER

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all, as blobs are written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"{name}.draft"
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._folder / name)

    def write_if_absent(self, name: str, data: bytes) -> bool:
        """See `Provable`."""
        try:
            with (self._folder / name).open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """See `Provable`."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        """See `Provable`."""
        (self._folder / name).unlink()
        with contextlib.suppress(OSError):  # another proof may be at it
            self._folder.rmdir()


def provable(url: str) -> Provable:
    """The store of a URL.

    Raises:
        ObjectStoreError: it is of no kind that is supported.
    """
    ObjectStore(url)
    return Directory(Path(unquote(urlparse(url).path)))


def prove(store: Provable) -> None:
    """Write, write conditionally, read and delete one object of the proof's own.

    Raises:
        ProofFailed: names the step.
    """
    name = uuid.uuid4().hex
    with _step("write"):
        store.write(name, _FIRST)
    try:
        with _step("read"):
            _require(store.read(name) == _FIRST, "it gives other bytes than were written")
        with _step("conditional write"):
            written = store.write_if_absent(name, _SECOND)
            _require(not written, "it wrote over an object that was there")
            _require(store.read(name) == _FIRST, "it refused, and wrote all the same")
    finally:
        with _step("delete"):
            store.delete(name)
            _require(store.read(name) is None, "the object is still there")


def _require(held: bool, reason: str) -> None:
    if not held:
        raise ObjectStoreError(reason)


class _step:
    """Names the step in whatever goes wrong within it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise ProofFailed(self._name, str(error) or type(error).__name__) from error
