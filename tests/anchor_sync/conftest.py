"""Replicas of anchor-sync on real servers. The test plays the worker and looks at the answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import nats
import nats.js.errors
import pytest
from tests import forked
from tests.forked import Forked

from dsec.platform.bus import Bus
from dsec.platform.clock import utc_now
from dsec_contracts import AnchorCaptured, AnchorLost, AnchorStored
from dsec_contracts.anchor import AnchorCapturedCircumstance, AnchorCapturedFact

WAIT_S_MAX = 60.0
SESSION = UUID("019cade2-11c0-7001-9f3a-5c7e9b2d5791")


def blob_of(position: int, size_bytes: int = 1000) -> bytes:
    """Bytes that no other position has."""
    return position.to_bytes(8, "big") * (size_bytes // 8)


@dataclass
class Rig:
    """A bus, replicas, and what they said."""

    bus: Bus
    nats_url: str
    folder: Path
    replicas: list[Forked] = field(default_factory=list)
    answers: list[AnchorStored | AnchorLost] = field(default_factory=list)

    def start(self, object_store_url: str, **settings: object) -> Forked:
        """Start a replica. It has little patience unless the test says otherwise."""
        name = f"r{len(self.replicas)}"
        told = {"ack_wait_s": 1, "absent_s_max": 1, "retry_s_max": 1} | settings
        env = os.environ | {
            "DSEC_NATS_URL": self.nats_url,
            "DSEC_OBJECT_STORE_URL": object_store_url,
            "DSEC_ANCHOR_REPLICA": name,
            **{f"DSEC_ANCHOR_{key.upper()}": str(value) for key, value in told.items()},
        }
        log = self.folder / f"{name}.log"
        process = forked.start("dsec.anchor_sync.__main__", env=env, log=log)
        self.replicas.append(process)
        return process

    async def capture(self, position: int, **told: Any) -> None:
        """Publish an anchor as a worker does, or as the test says."""
        data = blob_of(position)
        fact = AnchorCapturedFact(
            session_id=SESSION,
            position=position,
            anchor_id=f"{position:032x}",
            content=bytes(32),
            covers_agent=True,
        )
        usual = {"blob": hashlib.sha256(data).hexdigest(), "size_bytes": len(data), "data": data}
        circumstance = AnchorCapturedCircumstance.model_validate(usual | told)
        await self.bus.publish(
            AnchorCaptured(fact=fact, circumstance=circumstance),
            SESSION,
            source="test",
            time=utc_now(),
            event_id=f"{SESSION}.anchor.{position}.1",
            session_id=SESSION,
        )

    async def follow(self) -> None:
        """Keep all answers."""
        filters = ["dsec.anchor.stored.*", "dsec.anchor.lost.*"]
        consumer = await self.bus.consumer("test", filters, ack="none")
        while True:
            for message in await consumer.fetch(100, 0.5):
                event = message.event()
                assert isinstance(event, (AnchorStored, AnchorLost))
                self.answers.append(event)

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until `holds()`; fails the test otherwise, with what the replicas logged."""
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                while not holds():  # noqa: ASYNC110 - others publish, nothing notifies
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"{self.answers}\n{self.logs()}") from None

    async def answered(self, *positions: int) -> dict[int, AnchorStored | AnchorLost]:
        """The first answer for each position, once there are all."""
        await self.until(lambda: set(positions) <= {one.fact.position for one in self.answers})
        return {one.fact.position: one for one in reversed(self.answers)}

    async def settled(self) -> None:
        """Wait until the durable has nothing left."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                states = {state.name: state for state in await self.bus.consumers()}
                state = states.get("anchor-sync")
                if state is not None and state.pending + state.ack_pending == 0:
                    return
                await asyncio.sleep(0.05)

    def logs(self) -> str:
        """What the replicas wrote."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("r*.log")))


@pytest.fixture
async def rig(nats_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    """An empty stream; no replica yet."""
    connection = await nats.connect(nats_url)
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await connection.jetstream().delete_stream("DSEC")
    await connection.close()
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    made = Rig(bus, nats_url, tmp_path)
    following = asyncio.create_task(made.follow())
    yield made
    for process in made.replicas:
        process.kill()
        process.wait()
    following.cancel()
    await asyncio.wait([following], timeout=2)
    await bus.close()
