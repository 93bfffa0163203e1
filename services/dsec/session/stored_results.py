"""Results of tools that are too large for a message: they lie in the object store.

What the agent is told and what is hashed is the same either way, so a chain does not depend on the
way that a result took.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from dsec.session.io import Input, result_input

INLINE_BYTES_MAX = 65_536
"""A result of more canonical bytes travels as a reference, where there is an object store."""


class StoredResult(NamedTuple):
    """What came of a call, but for its content, which has to be fetched first."""

    ordinal: int
    blob: str
    """SHA-256 of the content, in hexadecimal digits: its name in the object store."""
    turn_hash: bytes

    def given(self, content: bytes) -> Input:
        """The input, once its content is there.

        Raises:
            ValueError: the content is another one.
        """
        if hashlib.sha256(content).hexdigest() != self.blob:
            raise ValueError(f"the result {self.blob[:12]} has other bytes than its name says")
        return result_input(self.ordinal, "", content, self.turn_hash)
