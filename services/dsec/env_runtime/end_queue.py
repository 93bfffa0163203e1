"""Ends of a lane's sessions that are not published yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dsec.env_runtime.seats import Seat
from dsec.session.io import Ended

OnEnded = Callable[[Seat, Ended], Awaitable[None]]


class EndQueue:
    """In the order in which they came to be."""

    def __init__(self, leave: Callable[[Seat], None], on_ended: OnEnded) -> None:
        """
        Args:
            leave: called before an end is published: the session's seat is free.
            on_ended: publishes it.
        """
        self._leave = leave
        self._on_ended = on_ended
        self._ends: list[tuple[Seat, Ended]] = []

    def __bool__(self) -> bool:
        return bool(self._ends)

    def add(self, seat: Seat, ended: Ended) -> None:
        """A session came to its end."""
        self._ends.append((seat, ended))

    def cut(self, seat: Seat, ended: Ended) -> None:
        """A session is over though its machine would go on. In place of another end that it came to
        meanwhile."""
        seat.machine.ended = ended
        self._ends = [(other, end) for other, end in self._ends if other is not seat]
        self._ends.append((seat, ended))

    async def publish(self) -> None:
        """Publish them. One whose anchors are on their way comes after these, another time."""
        waiting = []
        while self._ends:
            seat, ended = self._ends.pop(0)
            if seat.anchors_waiting:
                waiting.append((seat, ended))
                continue
            self._leave(seat)
            await self._on_ended(seat, ended)
        self._ends = waiting
