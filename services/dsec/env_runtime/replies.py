"""How the answers come to the lanes: those that go to them, and, for sessions that were elsewhere
before, those that go to the lane of an earlier attempt.

All answers are heard, each once and in their order. What the client drops on the way is not
delivered again, and asking again may bring another answer than the one that counts: so the numbers
of the deliveries are looked at, and where one is missing everything behind it is read anew.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from dsec.env_runtime.hearing import Hearing
from dsec.env_runtime.lane import Lane
from dsec.platform.bus import Bus, Consumer
from dsec.platform.bus.retry import AWAY
from dsec.platform.cancellation import cancelled
from dsec_contracts import (
    Event,
    RewardDeferred,
    RewardMissing,
    RewardScored,
    ToolFailed,
    ToolReturned,
    subjects,
)

log = logging.getLogger(__name__)

CONSUMER_INACTIVE_S = 120.0
FETCH_WAIT_S = 5.0
ANSWERS: tuple[type[Event], ...] = (
    RewardScored,
    RewardMissing,
    RewardDeferred,
    ToolReturned,
    ToolFailed,
)
"""What is published on the subjects of a lane, for its sessions."""


class Replies:
    """The consumers of the answers to one worker's lanes."""

    def __init__(self, bus: Bus, hearing: Hearing) -> None:
        self._bus = bus
        self._hearing = hearing
        self.followed: set[tuple[str, str]] = set()
        """Lanes of earlier attempts, each with the lane here that hears its answers too."""
        self._opened = 0

    async def own(self, lane: Lane, start_sequence: int) -> Coroutine[Any, Any, None]:
        """What hears the answers that go to a lane, for ever."""
        consumer = await self._open(f"lane-{lane.name}", lane.name, start_sequence)
        return self._hear(lane, consumer, lane.name, start_sequence - 1)

    async def follow(
        self, previous: str, lane: Lane, start_sequence: int
    ) -> Coroutine[Any, Any, None] | None:
        """What hears the answers that go to `previous` too, while `lane` has sessions from there.
        None: that is done already."""
        if (previous, lane.name) in self.followed:
            return None
        self.followed.add((previous, lane.name))
        consumer = await self._open(self._name(previous, lane), previous, start_sequence)
        return self._hear(lane, consumer, previous, start_sequence - 1, previous)

    def _name(self, of: str, lane: Lane) -> str:
        self._opened += 1  # a name of its own: the one before may be on its way out
        return f"lane-{of}-for-{lane.name}-{self._opened}"

    async def _open(self, name: str, lane: str, start_sequence: int) -> Consumer:
        consumer = await self._bus.consumer(
            name,
            [subjects.subject(event.event_name(), lane) for event in ANSWERS],
            start_sequence=start_sequence,
            ack="none",
            inactive_s=CONSUMER_INACTIVE_S,
        )
        self._hearing.add(consumer)
        return consumer

    async def _hear(
        self, lane: Lane, consumer: Consumer, of: str, after: int, previous: str | None = None
    ) -> None:
        """Have a lane hear the answers that go to the lane `of`, all of them and in order."""
        while (lost_after := await feed(lane, consumer, previous, after)) is not None:
            after = lost_after
            log.warning("answers to %s behind %d are lost on the way: read again", of, after)
            await self._forget(consumer)
            consumer = await self._open(self._name(of, lane), of, after + 1)
        if previous is not None:
            # Before anything else may happen: who comes now has to follow that lane anew.
            self.followed.discard((previous, lane.name))
            await self._forget(consumer)

    async def _forget(self, consumer: Consumer) -> None:
        self._hearing.remove(consumer)
        await consumer.close()
        with contextlib.suppress(*AWAY):  # then the server removes it once it is idle
            await self._bus.delete_consumer(consumer.name)


async def feed(
    lane: Lane, consumer: Consumer, previous: str | None = None, after: int = 0
) -> int | None:
    """Feed answers to a lane: for ever, or while it has any session that was on `previous` (the
    lane whose answers `consumer` gives).

    Args:
        after: the position in the stream behind which `consumer` begins.

    Returns:
        Where answers got lost on the way, the position of the last one before them.
    """
    ordinal = 0
    while not cancelled() and (previous is None or lane.has_from(previous)):
        # One at a time: asked for more, the client waits for word that there are none.
        for message in await consumer.fetch(1, FETCH_WAIT_S):
            ordinal += 1
            if message.consumer_sequence != ordinal:
                return after
            after = message.sequence
            lane.take(message)
    return None
