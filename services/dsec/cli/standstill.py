"""Whether what is published gets into the log: processes that run need not get on."""

from __future__ import annotations

import asyncio

from dsec.platform.bus import Bus, BusError, ConsumerState
from dsec.platform.bus.retry import LOOKING

RECORDER = "recorder"
STILL_S = 3.0
"""A recorder commits many times a second; one that has not moved for so long does not get on."""


async def standstill(nats_url: str) -> str | None:
    """Why the log stands still, in a sentence; None: it does not, or has nothing to do."""
    try:
        bus = await Bus.connect(nats_url, "status", LOOKING)
    except BusError as error:
        return str(error)
    try:
        before = await _recorder(bus)
        if before is None or not _waiting(before):
            return None
        await asyncio.sleep(STILL_S)
        after = await _recorder(bus)
    finally:
        await bus.close()
    if after is None or not _waiting(after) or after.floor > before.floor:
        return None
    return (
        f"{_waiting(after)} messages wait to be logged and none was in {STILL_S:.0f} s: sessions "
        "cannot get on. The log of the recorder says why."
    )


def _waiting(state: ConsumerState) -> int:
    return state.pending + state.ack_pending


async def _recorder(bus: Bus) -> ConsumerState | None:
    found = {state.name: state for state in await bus.consumers()}
    return found.get(RECORDER)
