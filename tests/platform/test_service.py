"""A service's process: what it exits with."""

from __future__ import annotations

import os
import signal

import pytest

from dsec.platform.bus import Bus, BusUnavailable
from dsec.platform.service import EXIT_AGAIN, Replica, serve
from dsec.platform.settings import Settings


@pytest.mark.nats
async def test_a_replica_that_is_told_to_stop_is_done_and_one_without_a_bus_starts_anew(
    nats_url: str,
) -> None:
    settings = Settings(nats_url=nats_url)
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    names = []

    async def works(replica: Replica) -> None:
        names.append(replica.name)
        os.kill(os.getpid(), signal.SIGTERM)
        await replica.stop.wait()

    async def falls(replica: Replica) -> None:
        raise BusUnavailable("the bus went away")

    async def is_wrong(replica: Replica) -> None:
        raise ValueError("a fault of ours")

    try:
        assert await serve(settings, "tool", "1", works) == 0
        assert names == ["tool-1"]
        assert await serve(settings, "tool", "1", falls) == EXIT_AGAIN
        with pytest.raises(ValueError, match="of ours"):
            await serve(settings, "tool", "1", is_wrong)
    finally:
        await bus.close()
