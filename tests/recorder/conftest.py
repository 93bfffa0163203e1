"""Servers of their own for the recorder's tests, and events as they are published.

The stream has one name, so every test gets a nats-server to itself; it starts in no time.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psycopg
import pytest

from dsec.platform.bus import Bus
from dsec.platform.clock import utc_now
from dsec.platform.migrations import migrate
from dsec.platform.stack.nats_server import NatsServerOptions, nats_server_process
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess
from dsec.recorder.leadership import Recorder
from dsec.recorder.settings import RecorderSettings
from dsec_contracts import (
    Event,
    RewardScored,
    SessionEnded,
    SessionPlaced,
    SessionRequested,
    SessionStarted,
    SessionStepped,
    canonical,
)
from dsec_contracts.columns import VarColumn
from dsec_contracts.reward import RewardCircumstance, RewardColumns
from dsec_contracts.session import (
    EndedFact,
    PlacedCircumstance,
    PlacedFact,
    RequestCircumstance,
    RequestFact,
    StartedCircumstance,
    StartedFact,
)
from dsec_contracts.step import StepCircumstance, StepColumns

NOW = datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=UTC)
WAIT_S_MAX = 60.0


def new_session(at: datetime | None = None) -> UUID:
    """A session id of now, or of another time."""
    ms = int((at.timestamp() if at else time.time()) * 1000)
    tail = int.from_bytes(os.urandom(10), "big") & ~(0xF << 76) & ~(0x3 << 62)
    return UUID(int=ms << 80 | 7 << 76 | 2 << 62 | tail)


def request_fact(session_id: UUID, **changes: object) -> RequestFact:
    values: dict[str, object] = {
        "session_id": session_id,
        "agent_spec": "a" * 64,
        "env_spec": "b" * 64,
        "reward_fn_hash": "c" * 64,
        "seed": 2**63 - 1,
        "max_steps": 5,
        "creation_timestamp": NOW,
        "labels": {"team": "blue"},
        "group_id": "g1",
        "rollout_index": 3,
    }
    return RequestFact.model_validate(values | changes)


def requested(session_id: UUID, client: str | None = None, **changes: object) -> SessionRequested:
    return SessionRequested(
        fact=request_fact(session_id, **changes), circumstance=RequestCircumstance(client=client)
    )


def placed(session_id: UUID, attempt: int = 1) -> SessionPlaced:
    return SessionPlaced(
        fact=PlacedFact(session_id=session_id, attempt=attempt, worker="w1", lane="l1"),
        circumstance=PlacedCircumstance(request=request_fact(session_id)),
    )


def started(session_id: UUID, chain: bytes = b"\0" * 32) -> SessionStarted:
    return SessionStarted(
        fact=StartedFact(session_id=session_id, reset=canonical.encode(["r"]), chain=chain),
        circumstance=StartedCircumstance(worker="w1", observation=canonical.encode([1.0])),
    )


def ended(session_id: UUID, steps: int = 0, code: str = "max_steps") -> SessionEnded:
    return SessionEnded(
        fact=EndedFact(
            session_id=session_id,
            status="completed",
            code=code,
            steps=steps,
            episodes=0,
            inputs=canonical.encode([]),
            chain=b"\1" * 32,
        )
    )


def stepped(
    sessions: Sequence[UUID],
    steps: Sequence[int],
    rewards: Sequence[float] | None = None,
    *,
    facts: Sequence[bytes] | None = None,
    causes: Sequence[bytes] | None = None,
    observations: Sequence[bytes] | None = None,
    terminated: Sequence[bool] | None = None,
) -> SessionStepped:
    n = len(sessions)
    rewards = rewards or [1.0] * n
    empty = VarColumn.pack([b""] * n)
    facts = facts or [
        canonical.encode([step, 0, [], [], 1, None, reward, False, False, {}, b"s", b"o", None])
        for step, reward in zip(steps, rewards, strict=True)
    ]
    return SessionStepped(
        rows=n,
        row=StepColumns(
            session_id=b"".join(s.bytes for s in sessions),
            attempt=struct.pack(f"<{n}i", *[1] * n),
            step=struct.pack(f"<{n}i", *steps),
            episode=struct.pack(f"<{n}i", *[0] * n),
            env_reward=struct.pack(f"<{n}d", *rewards),
            terminated=bytes(terminated or [False] * n),
            truncated=bytes(n),
            chain=b"".join(bytes([step % 256]) * 32 for step in steps),
            fact=VarColumn.pack(facts),
            cause=VarColumn.pack(causes or [b"started"] * n),
            observation=VarColumn.pack(observations or [b""] * n),
            prior=empty,
            reset_observation=empty,
            extras=empty,
            policy=VarColumn.pack([b"sales@v1"] * n),
        ),
        circumstance=StepCircumstance(worker="w1", lane="l1", reward_specs={"x": "y"}),
    )


def scored(
    sessions: Sequence[UUID], steps: Sequence[int], values: Sequence[float], revision: int = 1
) -> RewardScored:
    n = len(sessions)
    return RewardScored(
        rows=n,
        row=RewardColumns(
            session_id=b"".join(s.bytes for s in sessions),
            step=struct.pack(f"<{n}i", *steps),
            revision=struct.pack(f"<{n}i", *[revision] * n),
            value=struct.pack(f"<{n}d", *values),
            cause=b"c" * 16 * n,
            fact=VarColumn.pack(
                [
                    canonical.encode([step, revision, value, {"env": [value, 1.0]}, b"c" * 16])
                    for step, value in zip(steps, values, strict=True)
                ]
            ),
        ),
        circumstance=RewardCircumstance(lane="l1"),
    )


@pytest.fixture
def make() -> SimpleNamespace:
    """Makers of events."""
    makers = (
        new_session,
        request_fact,
        requested,
        placed,
        started,
        ended,
        stepped,
        scored,
    )
    return SimpleNamespace(now=NOW, **{maker.__name__: maker for maker in makers})


class Server:
    """A nats-server of the test's own. It can be stopped, and started as it was some time ago."""

    def __init__(self, folder: Path) -> None:
        self._options = NatsServerOptions(
            directory=folder / "nats", log_path=folder / "nats.log", port=free_port(), password="x"
        )
        self._saved = folder / "saved"
        self.url = self._options.url

    async def start(self) -> None:
        self._child = ChildProcess(nats_server_process(self._options))
        await self._child.wait_ready()

    async def stop(self) -> None:
        await self._child.stop()

    async def save(self) -> None:
        """Remember what it holds now."""
        await self.stop()
        shutil.copytree(self._options.directory, self._saved)
        await self.start()

    async def set_back(self) -> None:
        """Start it with what it held when it was saved."""
        await self.stop()
        shutil.rmtree(self._options.directory)
        shutil.copytree(self._saved, self._options.directory)
        await self.start()


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[Server]:
    """A nats-server of the test's own."""
    server = Server(tmp_path)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
def hypertable_log_url(fresh_timescale_url: str) -> str:
    """A migrated database of the test's own, whose log is a hypertable."""
    migrate(fresh_timescale_url)
    return fresh_timescale_url


class Rig:
    """A bus, a database and recorders on them."""

    def __init__(self, bus: Bus, server: Server, log_url: str) -> None:
        self.bus = bus
        self.server = server
        self.url = server.url
        self.log_url = log_url

    def settings(self, **changes: Any) -> RecorderSettings:
        quick = {"fetch_wait_s": 0.1, "standby_poll_s": 0.05, "retry_wait_s_max": 0.3}
        return RecorderSettings(nats_url=self.url, database_url=self.log_url, **(quick | changes))

    @asynccontextmanager
    async def recorder(
        self, now: Callable[[], datetime] = utc_now, **changes: Any
    ) -> AsyncIterator[Recorder]:
        """A recorder that runs until the block ends."""
        bus = await Bus.connect(self.url, "recorder")
        recorder = Recorder(bus, self.settings(**changes), now)
        stop = asyncio.Event()
        task = asyncio.create_task(recorder.run(stop))
        try:
            yield recorder
        finally:
            stop.set()
            await asyncio.wait_for(task, WAIT_S_MAX)
            await bus.close()

    async def publish(self, event: Event, key: object, cause: str | None = None) -> int:
        return await self.bus.publish(
            event, key, source="test", time=utc_now(), event_id=str(uuid.uuid4()), cause=cause
        )

    def query(self, text: str, *arguments: object) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.log_url) as connection:
            return connection.execute(text, arguments or None).fetchall()

    def keys(self, session_id: UUID) -> list[str]:
        found = self.query(
            'select key from event_log where session_id = %s order by epoch, sequence, "index"',
            session_id,
        )
        return [key for (key,) in found]

    async def floor_at(self, sequence: int, timeout_s: float = WAIT_S_MAX) -> None:
        """Wait until the floor has come to a sequence."""
        await self.until(
            lambda: self.query("select 1 from log_floor where sequence >= %s", sequence),
            timeout_s,
        )

    async def until(self, condition: Callable[[], object], timeout_s: float = WAIT_S_MAX) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
async def rig(nats_server: Server, log_url: str) -> AsyncIterator[Rig]:
    """A bus with a stream, and a migrated database."""
    bus = await Bus.connect(nats_server.url, "test")
    await bus.ensure_stream()
    yield Rig(bus, nats_server, log_url)
    await bus.close()


@pytest.fixture
async def hypertable_rig(nats_server: Server, hypertable_log_url: str) -> AsyncIterator[Rig]:
    """The same on a hypertable."""
    bus = await Bus.connect(nats_server.url, "test")
    await bus.ensure_stream()
    yield Rig(bus, nats_server, hypertable_log_url)
    await bus.close()
