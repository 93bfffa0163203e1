"""Episodes on the disk between two passes: the first finds out what they hold, the second writes.

Kept as canonical bytes, so that the second pass sees what the first saw; memory holds one episode.
"""

from __future__ import annotations

import dataclasses
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from dsec.client.episodes import Episode
from dsec_contracts.canonical import decode, encode

_LENGTH = struct.Struct("<Q")
_FIELDS = tuple(field.name for field in dataclasses.fields(Episode))


class Spool:
    """A temporary file without a name, which goes away with its process."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()

    def add(self, episode: Episode) -> None:
        """One more episode, behind all others."""
        values = {name: getattr(episode, name) for name in _FIELDS}
        data = encode({**values, "session_id": episode.session_id.bytes})
        self._file.write(_LENGTH.pack(len(data)) + data)

    def __iter__(self) -> Iterator[Episode]:
        """All episodes, in their order."""
        self._file.seek(0)
        while head := self._file.read(_LENGTH.size):
            values = decode(self._file.read(_LENGTH.unpack(head)[0]))
            yield Episode(**{**values, "session_id": UUID(bytes=values["session_id"])})

    def close(self) -> None:
        """Give the space back."""
        self._file.close()
