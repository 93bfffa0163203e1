"""Whoever publishes: what is the same in all the events of one service or worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from dsec.platform.bus.connection import Bus
from dsec_contracts.envelope import Event


@dataclass(frozen=True, slots=True)
class Author:
    """Publishes under one source, by one clock and, for a worker, behind one fence."""

    bus: Bus
    source: str
    now: Callable[[], datetime]
    fence: str | None = None

    async def publish(
        self,
        event: Event,
        key: object,
        event_id: str,
        cause: str | None,
        *,
        session_id: UUID | None = None,
        expected_sequence: int | None = None,
    ) -> int:
        """Publish an event and return its position in the stream. As `Bus.publish`, errors too."""
        return await self.bus.publish(
            event,
            key,
            source=self.source,
            time=self.now(),
            event_id=event_id,
            session_id=session_id,
            cause=cause,
            fence=self.fence,
            expected_sequence=expected_sequence,
        )

    async def publish_transient(self, event: Event, key: object, event_id: str) -> None:
        """Publish what nobody waits for and the log does not hold. As `Bus.publish_transient`."""
        await self.bus.publish_transient(
            event, key, source=self.source, time=self.now(), event_id=event_id
        )
