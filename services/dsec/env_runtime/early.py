"""What came for a session before the session did: cancels, and changes of its curriculum level.

Placements, cancels and changes come on one consumer, and opening a seat takes a while. So whatever
is for a session that is not here, or not yet, is kept for it, within bounds.
"""

from __future__ import annotations

from uuid import UUID

from dsec.platform.bounded import Bounded
from dsec.session.io import Input

CANCELS_REMEMBERED_MAX = 10_000
CHANGES_REMEMBERED_MAX = 10_000
"""Changes of a curriculum level, of sessions that are not here, or not yet."""


class Early:
    """Inputs of sessions that are not here, or not yet."""

    def __init__(self) -> None:
        self.cancels: Bounded[UUID, Input] = Bounded(CANCELS_REMEMBERED_MAX)
        self._changes: Bounded[UUID, Input] = Bounded(CHANGES_REMEMBERED_MAX)

    def cancel(self, session_id: UUID, given: Input) -> None:
        """A cancel came."""
        self.cancels.remember(session_id, given)

    def change(self, session_id: UUID, given: Input) -> None:
        """A change of the level came. Of several the last one counts, and some come again out of
        turn."""
        known = self._changes.get(session_id)
        if known is None or known.ordinal < given.ordinal:
            self._changes.remember(session_id, given)

    def joined(self, session_id: UUID, pending: list[Input]) -> list[Input]:
        """A session is here: what it is given, of what the log has for it and of what came early,
        in its order. Nothing of it is kept any longer."""
        pending = list(pending)
        if (cancel := self.cancels.pop(session_id, None)) is not None:
            pending.append(cancel)
        if (change := self._changes.pop(session_id, None)) is not None:
            pending.insert(0, change)
        return pending

    def forget(self, session_id: UUID) -> None:
        """A session is over, or elsewhere."""
        self.cancels.pop(session_id, None)
        self._changes.pop(session_id, None)
