"""Ticks to be scored, replicas that score them, and what they published."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
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
from tests import forked
from tests.forked import Forked

from dsec.platform.bus import Bus, Message
from dsec.platform.roles import SERVICES_BUCKET
from dsec.session.documents import RewardDocument, seal
from dsec_contracts import (
    RewardMissing,
    RewardScored,
    SessionStepped,
    decode,
    encode,
    subjects,
)
from dsec_contracts.columns import VarColumn
from dsec_contracts.service import ServiceFact
from dsec_contracts.step import StepCircumstance, StepColumns

WAIT_S_MAX = 60.0
HEADER = "import dsec\n"


def spec_of(body: str, entry: str = "reward.py:score") -> tuple[str, bytes]:
    """Hash and content of a reward spec whose file has this source; it names the services that the
    decorator does, as a spec that is registered does."""
    named = re.search(r"services=(\[.*?\])", body)
    document = RewardDocument(entry=entry, services=ast.literal_eval(named[1]) if named else [])
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
    """A lane that sends ticks, the replicas that it may start, and what they answered."""

    bus: Bus
    url: str
    folder: Path
    lane: str
    replicas: list[Forked] = field(default_factory=list)

    async def send(
        self,
        specs: list[str],
        name: str = "a",
        *,
        traceparent: str | None = None,
        step: int = 0,
        env_reward: Callable[[int], float] = lambda _: 1.0,
        deferrable: bool = False,
    ) -> int:
        """Publish a tick of the lane as event `<lane>.<name>`."""
        event = tick(specs, step=step, lane=self.lane, env_reward=env_reward)
        if deferrable:
            ids = [session(n).hex for n in range(len(specs))]
            circumstance = event.circumstance.model_copy(update={"deferrable": ids})
            event = event.model_copy(update={"circumstance": circumstance})
        return await self.bus.publish(
            event,
            self.lane,
            source="dsec/env-runtime/test",
            time=datetime.now(UTC),
            event_id=f"{self.lane}.{name}",
            traceparent=traceparent,
        )

    def know(self, *specs: tuple[str, bytes]) -> None:
        """Register specs with the replicas, running ones too."""
        for spec_hash, content in specs:
            whole = self.folder / f"{spec_hash}.part"
            whole.write_bytes(content)
            whole.rename(self.folder / spec_hash)

    def declare(self, name: str, url: str, version: int = 1, **terms: object) -> None:
        """Declare an outside service to the replicas, running ones too."""
        told = {"qps_budget": 1000, "deadline_s": 10.0} | terms
        fact = ServiceFact.model_validate(
            {"name": name, "base_url": url, "version": version, **told}
        )
        whole = self.folder / f"{name}.part"
        whole.write_text(fact.model_dump_json())
        whole.rename(self.folder / f"{name}.service")

    def start(self, env: dict[str, str] | None = None, **settings: object) -> Forked:
        """Start a replica."""
        name = f"r{len(self.replicas)}"
        self.replicas.append(start_replica(self.url, self.folder, name, env, **settings))
        return self.replicas[-1]

    async def messages(self, event_name: str, count: int, key: str | None = None) -> list[Message]:
        """The first `count` messages of an event for this lane, or under another key."""
        name = f"test-{time.monotonic_ns()}"
        subject = subjects.subject(event_name, key or self.lane)
        consumer = await self.bus.consumer(name, [subject], ack="none")
        found: list[Message] = []
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                while len(found) < count:
                    found += await consumer.fetch(256, 0.5)
        except TimeoutError:
            raise AssertionError(f"{len(found)} of {count} {event_name}: {self.logs()}") from None
        finally:
            await consumer.close()
            await self.bus.delete_consumer(name)
        return found

    async def scored(self, count: int) -> list[RewardScored]:
        """The first messages of rewards."""
        events = [m.event() for m in await self.messages("reward.scored", count)]
        assert all(isinstance(event, RewardScored) for event in events)
        return [event for event in events if isinstance(event, RewardScored)]

    async def missing(self, count: int) -> dict[UUID, RewardMissing]:
        """The first notices, by session."""
        events = [m.event() for m in await self.messages("reward.missing", count)]
        return {e.fact.session_id: e for e in events if isinstance(e, RewardMissing)}

    async def dead(self) -> list[Message]:
        """What was put aside."""
        name = f"test-{time.monotonic_ns()}"
        consumer = await self.bus.consumer(name, [subjects.dead_letter("reward")], ack="none")
        count, found = (await consumer.state()).pending, list[Message]()
        async with asyncio.timeout(WAIT_S_MAX):
            while len(found) < count:
                found += await consumer.fetch(count - len(found), 1)
        await consumer.close()
        await self.bus.delete_consumer(name)
        return found

    async def deliveries(self) -> int:
        """How often the durable has delivered anything."""
        info = await self.bus._js.consumer_info(subjects.STREAM, "reward")
        assert info.delivered is not None
        return int(info.delivered.consumer_seq)

    async def receiving(self, replicas: int) -> None:
        """Wait until so many replicas wait for messages."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                with contextlib.suppress(nats.js.errors.NotFoundError):  # no replica is up yet
                    info = await self.bus._js.consumer_info(subjects.STREAM, "reward")
                    if (info.num_waiting or 0) >= replicas:
                        return
                await asyncio.sleep(0.05)

    async def settled(self) -> None:
        """Wait until the durable has nothing left."""
        async with asyncio.timeout(WAIT_S_MAX):
            while await self.unsettled():  # noqa: ASYNC110 - the server's, not ours
                await asyncio.sleep(0.05)

    async def unsettled(self) -> int:
        """Messages that wait or are being worked on."""
        states = {state.name: state for state in await self.bus.consumers()}
        state = states.get("reward")
        return state.pending + state.ack_pending if state else 1  # no replica is up yet

    async def left(self, count: int) -> None:
        """Wait until so many are not settled: what a replica acknowledged last may be on its way.

        A server that has more, or less, has them for good.
        """
        async with asyncio.timeout(WAIT_S_MAX):
            while await self.unsettled() != count:  # noqa: ASYNC110 - the server's, not ours
                await asyncio.sleep(0.05)

    async def logged(self, text: str) -> None:
        """Wait until a replica has logged something."""
        async with asyncio.timeout(WAIT_S_MAX):
            while text not in self.logs():  # noqa: ASYNC110 - written by another process
                await asyncio.sleep(0.05)

    def logs(self) -> str:
        """The end of every replica's log."""
        return "\n".join(p.read_text()[-5000:] for p in sorted(self.folder.glob("*.log")))


def start_replica(
    url: str, folder: Path, name: str, env: dict[str, str] | None = None, **settings: object
) -> Forked:
    """A replica whose specs lie in a folder."""
    # Rows that are scored again come in messages of their own, which is not what most tests count.
    settings = {"recheck_s": 0} | settings
    told = {f"DSEC_REWARD_{key.upper()}": str(value) for key, value in settings.items()}
    whole = os.environ | {"DSEC_NATS_URL": url, "DSEC_REWARD_REPLICA": name} | told | (env or {})
    return forked.start("tests.reward.replica", str(folder), env=whole, log=folder / f"{name}.log")


async def _empty_stream(url: str) -> None:
    nc = await nats.connect(url)
    for stream in (subjects.STREAM, f"KV_{SERVICES_BUCKET}"):
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await nc.jetstream().delete_stream(stream)
    await nc.close()
    bus = await Bus.connect(url, "test")
    await bus.ensure_stream()
    await bus.close()


@pytest.fixture(scope="module")
def shared(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One replica for the tests of a module that leave it alive, and its folder of specs."""
    folder = tmp_path_factory.mktemp("reward")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(_empty_stream(nats_url))
    loop.close()
    replica = start_replica(nats_url, folder, "shared", deadline_s=1, absent_s_max=3, ack_wait_s=1)
    yield folder
    alive = replica.poll() is None
    replica.kill()
    replica.wait()
    assert alive


@pytest.fixture
async def service(
    shared: Path, nats_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[Rig]:
    """A lane of its own on the shared replica."""
    bus = await Bus.connect(nats_url, "test")
    made = Rig(bus, nats_url, shared, request.node.name[:60])
    made.know(ENV_SPEC)
    yield made
    await bus.close()


@pytest.fixture
async def rig(nats_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    """An empty stream without a replica."""
    await _empty_stream(nats_url)
    bus = await Bus.connect(nats_url, "test")
    made = Rig(bus, nats_url, tmp_path, "w-1-0")
    made.know(ENV_SPEC)
    yield made
    for replica in made.replicas:
        replica.kill()
        replica.wait()
    await bus.close()


def facts(events: list[RewardScored]) -> dict[tuple[bytes, int], bytes]:
    """By session and step; a row that came twice must be the same twice."""
    found: dict[tuple[bytes, int], bytes] = {}
    for event in events:
        ids = [event.row.session_id[n : n + 16] for n in range(0, 16 * event.rows, 16)]
        for raw_id, fact in zip(ids, event.row.fact.unpack(), strict=True):
            key = raw_id, decode(fact)[0]
            assert found.setdefault(key, fact) == fact
    return found
