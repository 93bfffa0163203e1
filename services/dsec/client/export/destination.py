"""Where an export goes: whole or not there at all, and never over something by accident."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from dsec.client.endpoints import ClientError

DATASET_MARK = Path("data", "metadata.json")


class Destination:
    """A file or folder that is made beside its place and moved there when it is whole.

    Args:
        path: the place.
        folder: a folder, not a file.
        force: replace what is there; of folders only one that was exported.

    Raises:
        ClientError: something is there, or the place cannot be written.
    """

    def __init__(self, path: Path, *, folder: bool, force: bool) -> None:
        self.path = path.expanduser().absolute()
        self._folder = folder
        self._force = force
        self._refuse_what_is_there()

    def _refuse_what_is_there(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not self._force:
            raise ClientError(
                f"{self.path} is there already: choose another --out, or replace it with --force"
            )
        if self.path.is_dir() and not (self._folder and self._is_dataset()):
            raise ClientError(
                f"{self.path} is a folder that no export made: choose another --out; --force "
                "does not replace it"
            )

    def _is_dataset(self) -> bool:
        entries = sorted(entry.name for entry in self.path.iterdir())
        return not entries or (entries == ["data"] and (self.path / DATASET_MARK).is_file())

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        except OSError as error:
            reason = error.strerror or error
            raise ClientError(f"{self.path.parent} cannot be written: {reason}") from error
        self._draft = Path(made)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)

    @property
    def draft(self) -> Path:
        """Where it is made."""
        return self._draft / self.path.name

    def commit(self) -> int:
        """Move it to its place. Returns its size in bytes.

        Raises:
            ClientError: something came to be there meanwhile.
        """
        files = [f for f in self.draft.rglob("*") if f.is_file()] if self._folder else [self.draft]
        for file in files:
            _sync(file)
        size_bytes = sum(file.stat().st_size for file in files)
        self._refuse_what_is_there()
        if self.path.is_dir():
            self.path.rename(self._draft / "replaced")
        os.replace(self.draft, self.path)
        return size_bytes


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
