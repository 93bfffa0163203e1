"""What lies in an object store, as far as it is ours: blobs, and what was left on the way to one.

A store may hold other people's objects too. Nothing is looked at whose name we would not have
given it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

REFRESH_AGE_S = 900.0
"""A blob that is put again and is older than this is as young as a new one afterwards: whoever puts
it is about to name it. Well below the least age at which blobs are collected."""
COLLECT_AGE_S_MIN = 3600.0
"""Nothing younger is ever collected: a blob is put before the event that names it is logged."""

_BLOB = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})")
_LEFT = re.compile(r"[0-9a-f]{2}/tmp[a-z0-9_]{8}|\.proof/([0-9a-f]{32}|tmp[a-z0-9_]{8})")


class Listed(NamedTuple):
    """An object: its name, how large it is, and when it was written (seconds since 1970)."""

    name: str
    size_bytes: int
    written_s: float

    @property
    def key(self) -> str | None:
        """The blob's key; None for what is none."""
        found = _BLOB.fullmatch(self.name)
        return found[2] if found else None

    @property
    def is_left(self) -> bool:
        """Whether it is a draft or a proof, which whoever made it did not live to remove."""
        return _LEFT.fullmatch(self.name) is not None
