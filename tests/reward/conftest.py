"""Ticks to be scored, replicas that score them, and what they published."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import nats
import nats.js.errors
import numpy as np
import pytest

from dsec.platform.bus import Bus, Message
from dsec.session.documents import RewardDocument, seal
from dsec_contracts import Event, SessionStepped, encode, subjects
from dsec_contracts.columns import VarColumn
from dsec_contracts.step import StepCircumstance, StepColumns

REPLICA = Path(__file__).with_name("replica.py")
WAIT_S_MAX = 20.0
HEADER = "import dsec\n"


def spec_of(body: str, entry: str = "reward.py:score") -> tuple[str, bytes]:
    """Hash and content of a reward spec whose file has this source."""
    document = RewardDocument(entry=entry)
    return seal("reward", document, {"reward.py": (HEADER + body).encode()})


ENV_SPEC = seal("reward", RewardDocument(), {})


def session(n: int) -> UUID:
    """The id of the n-th session."""
    return UUID(int=(1_767_225_600_000 << 80) | (7 << 76) | (2 << 62) | n)


def step_fact(
    step: int = 0, *, env_reward: float = 1.0, action: object = 0, info: object = None, n: int = 0
) -> bytes:
    """The fact of a CartPole step."""
    return encode(
        [
            step,
            0,
            [],
            [],
            np.int64(action) if type(action) is int else action,
            None,
            env_reward,
            False,
            False,
            {} if info is None else info,
            n.to_bytes(16, "big"),
            b"o" * 16,
            None,
        ]
    )


def observation(n: int) -> bytes:
    """A canonical CartPole observation."""
    return encode(np.array([n, 0.1, -0.2, 0.3], np.float32))


def tick(
    specs: list[str],
    *,
    step: int = 0,
    lane: str = "w-1-0",
    env_reward: Callable[[int], float] = lambda _: 1.0,
) -> SessionStepped:
    """One row a spec hash: session n is at `step`."""
    n = len(specs)
    rewards = [env_reward(row) for row in range(n)]
    ids = [session(row) for row in range(n)]
    none = VarColumn.pack([b""] * n)
    columns = StepColumns(
        session_id=b"".join(i.bytes for i in ids),
        attempt=np.ones(n, "<i4").tobytes(),
        step=np.full(n, step, "<i4").tobytes(),
        episode=np.zeros(n, "<i4").tobytes(),
        env_reward=np.array(rewards, "<f8").tobytes(),
        terminated=bytes(n),
        truncated=bytes(n),
        chain=b"".join(bytes([row % 256]) * 16 + b"tail-of-chain..." for row in range(n)),
        fact=VarColumn.pack([step_fact(step, env_reward=r, n=i) for i, r in enumerate(rewards)]),
        cause=VarColumn.pack([b"started"] * n),
        observation=VarColumn.pack([observation(row + 1) for row in range(n)]),
        prior=VarColumn.pack([observation(row) for row in range(n)]),
        reset_observation=none,
        extras=none,
        policy=none,
    )
    circumstance = StepCircumstance(
        worker="w-1",
        lane=lane,
        tick=step,
        reward_specs={i.hex: spec for i, spec in zip(ids, specs, strict=True) if spec},
    )
    return SessionStepped(rows=n, row=columns, circumstance=circumstance)


@dataclass
class Rig:
    """A stream, replicas on it, and what they answered."""

    bus: Bus
    url: str
    folder: Path
    replicas: list[subprocess.Popen[bytes]] = field(default_factory=list)

    async def send(
        self, event: SessionStepped, event_id: str, traceparent: str | None = None
    ) -> int:
        return await self.bus.publish(
            event,
            event.circumstance.lane,
            source="dsec/env-runtime/test",
            time=datetime.now(UTC),
            event_id=event_id,
            traceparent=traceparent,
        )

    def know(self, *specs: tuple[str, bytes]) -> None:
        """Register specs with the replicas, running ones too."""
        for spec_hash, content in specs:
            whole = self.folder / f"{spec_hash}.part"
            whole.write_bytes(content)
            whole.rename(self.folder / spec_hash)

    def start(self, **settings: object) -> subprocess.Popen[bytes]:
        """Start a replica."""
        told = {f"DSEC_REWARD_{k.upper()}": str(v) for k, v in settings.items()}
        name = f"r{len(self.replicas)}"
        log = (self.folder / f"{name}.log").open("wb")
        env = os.environ | {"DSEC_NATS_URL": self.url, "DSEC_REWARD_REPLICA": name} | told
        replica = subprocess.Popen(
            [sys.executable, str(REPLICA), str(self.folder)], env=env, stderr=log
        )
        self.replicas.append(replica)
        return replica

    async def messages(self, wildcard: str, count: int) -> list[Message]:
        """The first `count` messages under a subject."""
        name = f"test-{time.monotonic_ns()}"
        consumer = await self.bus.consumer(name, [wildcard], ack="none")
        found: list[Message] = []
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                while len(found) < count:
                    found += await consumer.fetch(256, 0.5)
        except TimeoutError:
            raise AssertionError(f"{len(found)} of {count} on {wildcard}: {self.logs()}") from None
        finally:
            await consumer.close()
            await self.bus.delete_consumer(name)
        return found

    async def events(self, wildcard: str, count: int) -> list[Event]:
        return [message.event() for message in await self.messages(wildcard, count)]

    async def deliveries(self) -> int:
        """How often the durable has delivered anything."""
        info = await self.bus._js.consumer_info(subjects.STREAM, "reward")
        assert info.delivered is not None
        return int(info.delivered.consumer_seq)

    async def settled(self) -> None:
        """Wait until the durable has nothing left."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                states = {s.name: s for s in await self.bus.consumers()}
                if (s := states.get("reward")) and not s.pending and not s.ack_pending:
                    return
                await asyncio.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(p.read_text()[-3000:] for p in sorted(self.folder.glob("*.log")))


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """A connection, and an empty stream."""
    nc = await nats.connect(nats_url)
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await nc.jetstream().delete_stream(subjects.STREAM)
    await nc.close()
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    yield bus
    await bus.close()


@pytest.fixture
def rig(bus: Bus, nats_url: str, tmp_path: Path) -> Iterator[Rig]:
    """No replica runs yet; `env` is registered."""
    made = Rig(bus, nats_url, tmp_path)
    made.know(ENV_SPEC)
    yield made
    for replica in made.replicas:
        replica.kill()
        replica.wait()
