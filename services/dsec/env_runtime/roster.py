"""Which sessions a worker has: those that are being opened, those that are live, and their seats.

A session is in one of the two from the moment that its placement is read until it is over or handed
back, so that a placement that comes twice opens no second seat.
"""

from __future__ import annotations

from uuid import UUID

from dsec.env_runtime.early import Early
from dsec.env_runtime.heap import Heap
from dsec.env_runtime.seats import Seat
from dsec_contracts import SessionPlaced


class Roster:
    """The sessions of one worker."""

    def __init__(self, sessions_max: int) -> None:
        self.seats: dict[UUID, Seat] = {}
        """Those that are live."""
        self.opening: dict[UUID, SessionPlaced] = {}
        self.early = Early()
        self.heap = Heap()
        self._free = list(range(sessions_max - 1, -1, -1))

    def placed(self, event: SessionPlaced) -> bool:
        """A placement came. False: that session is here already."""
        session_id = event.fact.session_id
        if session_id in self.seats or session_id in self.opening:
            return False
        self.opening[session_id] = event
        return True

    def take_index(self) -> int | None:
        """A free seat's; None where there is none."""
        return self._free.pop() if self._free else None

    def live(self, seat: Seat) -> None:
        """A session is live from now on."""
        session_id = seat.placed.session_id
        self.seats[session_id] = seat
        self.heap.started()
        self.opening.pop(session_id, None)

    def close(self, session_id: UUID, index: int | None) -> None:
        """A session is over or handed back. `index`: of its seat, if it had one."""
        self.opening.pop(session_id, None)
        if index is None:
            return
        if self.seats.pop(session_id, None) is not None:
            self.heap.ended(len(self.seats))
        self.early.forget(session_id)
        self._free.append(index)
