"""The node of a NATS cluster that leads the stream: found by asking, killed, and seen replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dsec.platform.bus import Bus, BusError, StreamState
from dsec.platform.bus.retry import AWAY
from rig import Rig, say

ELECTED_S_MAX = 60.0
CAUGHT_UP_S_MAX = 120.0
"""A node that was killed has started again and has all of the stream."""
POLL_S = 0.1


class NatsLeader:
    """Whoever leads the stream of a stack."""

    def __init__(self, stack: Rig, bus: Bus) -> None:
        self._stack = stack
        self._bus = bus

    async def kill(self, loaded: Callable[[], bool]) -> float | None:
        """SIGKILL to the leader; returns the seconds until another one takes what services publish.

        Args:
            loaded: whether services have anything to publish.

        Returns:
            None where they had not: before, and nothing was killed, or before anything was taken.

        Raises:
            TimeoutError: the nodes are not all there before, or none takes anything after it.
        """
        before = await self._caught_up()
        if not loaded():
            return None
        process = self._stack.nats_node(before.leader)
        if process is None:
            raise RuntimeError(f"no process of this stack is the node {before.leader}")
        say(f"  kill {before.leader}, which leads the stream")
        began_s = time.monotonic()
        process.kill()
        async with asyncio.timeout(ELECTED_S_MAX):
            while True:
                now = await self._state()
                if now is not None and now.leader not in ("", before.leader):
                    if now.last_sequence > before.last_sequence:
                        break
                    if not loaded():
                        return None
                await asyncio.sleep(POLL_S)
        seconds = time.monotonic() - began_s
        say(f"  {now.leader} leads after {seconds:.1f} s")
        return seconds

    async def _caught_up(self) -> StreamState:
        async with asyncio.timeout(CAUGHT_UP_S_MAX):
            while True:
                now = await self._state()
                if now is not None and now.leader and not now.behind:
                    return now
                await asyncio.sleep(POLL_S)

    async def _state(self) -> StreamState | None:
        try:
            return await self._bus.stream_state()
        except (BusError, *AWAY):
            return None  # nobody leads
