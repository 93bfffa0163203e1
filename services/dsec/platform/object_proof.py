"""Proves that an object store does what blobs rely on: write, write once, read, delete.

Some stores answer "done" to a conditional write and overwrite all the same; a share may be mounted
for reading only. That has to be found out before anything is trusted to it.
"""

from __future__ import annotations

import uuid

from dsec.platform.object_errors import ObjectStoreError
from dsec.platform.objects import Backend

PROOF_FOLDER = ".proof"
_FIRST, _SECOND = b"first", b"second"


class ProofFailed(Exception):
    """One of the steps did not do what it must; says which, and what happened."""

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"{step}: {reason}")
        self.step = step
        self.reason = reason


def prove(store: Backend) -> None:
    """Write, write conditionally, read and delete one object of the proof's own.

    Raises:
        ProofFailed: names the step.
    """
    name = f"{PROOF_FOLDER}/{uuid.uuid4().hex}"
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
