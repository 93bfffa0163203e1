"""Calls under way, by their sessions: what a session's end leaves behind is stopped.

A session ends with calls under way when it is cancelled or fails. Nobody will hear what comes of
them, so they need not keep their places until their deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar
from uuid import UUID

from dsec.platform.bounded import Bounded

T = TypeVar("T")

ENDED_KEPT_MAX = 65_536
"""Sessions that have ended, remembered for their calls that come after."""


class SessionOver(Exception):
    """The session of a call has ended."""


class UnderWay:
    """Calls under way. One whose session has ended is not begun."""

    def __init__(self) -> None:
        self._calls: dict[UUID, set[asyncio.Task[Any]]] = {}
        self._ended: Bounded[UUID, None] = Bounded(ENDED_KEPT_MAX)

    async def on_session_ended(self, headers: Mapping[str, str], _: bytes) -> None:
        """Stop the calls of the session that a message is about."""
        try:
            session_id = UUID(headers.get("ce-subject", ""))
        except ValueError:
            return  # which the recorder puts aside
        self._ended.remember(session_id, None)
        for call in self._calls.get(session_id, ()):
            call.cancel()

    async def run(self, session_id: UUID, call: Coroutine[Any, Any, T]) -> T:
        """What a call gives, unless its session ends first.

        Raises:
            SessionOver: it did.
        """
        if session_id in self._ended:
            call.close()
            raise SessionOver
        task = asyncio.create_task(call)
        self._calls.setdefault(session_id, set()).add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if session_id in self._ended and not (current and current.cancelling()):
                raise SessionOver from None
            raise
        finally:
            calls = self._calls[session_id]
            calls.discard(task)
            if not calls:
                del self._calls[session_id]
