"""A scheduler among real servers: nats-server, PostgreSQL and the recorder; the workers are played
by the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID

import nats
import nats.js.errors
import psutil
import psycopg
import pytest
import uuid_utils
from psycopg.rows import dict_row
from tests import forked
from tests.forked import Forked

from dsec.platform.bus import Bus, Message
from dsec.platform.clock import utc_now
from dsec.platform.settings import Settings
from dsec.recorder.leadership import Recorder
from dsec.recorder.settings import RecorderSettings
from dsec.scheduler.__main__ import serve
from dsec.scheduler.handlers import CONSUMER
from dsec.scheduler.history import History
from dsec.scheduler.leadership import LeadershipLost
from dsec.scheduler.settings import load_config
from dsec_contracts import (
    Event,
    SessionEnded,
    SessionPlaced,
    SessionRequested,
    SessionStarted,
    SpecRegistered,
    WorkerHeartbeat,
    keys,
)
from dsec_contracts.canonical import encode
from dsec_contracts.session import RequestFact, StartedFact
from dsec_contracts.spec import SpecFact
from dsec_contracts.worker import Culprit, HeartbeatCircumstance, HeartbeatFact

BEAT_S = 0.2
WAIT_S_MAX = 60.0
"""For what always happens, and mostly within a second."""
CONFIG = """
heartbeat_period_s: 0.5
heartbeat_limit_s: 2.0
session_lifecycle: {max_restarts: 3, restart_wait_s: 10}
"""


def uuid7() -> UUID:
    """A new session id."""
    return UUID(str(uuid_utils.uuid7()))


def spec_event(kind: Any, document: dict[str, Any] | None = None) -> SpecRegistered:
    """A spec; what is in it is nobody's business here."""
    content = encode({"kind": kind, "document": document or {}, "files": {}})
    return SpecRegistered(
        fact=SpecFact(spec_hash=sha256(content).hexdigest(), kind=kind, content=content)
    )


SPECS = {kind: spec_event(kind) for kind in ("agent", "env", "reward")}


def request_fact(**changes: Any) -> RequestFact:
    """A request that can be admitted."""
    value = {
        "session_id": uuid7(),
        "agent_spec": SPECS["agent"].fact.spec_hash,
        "env_spec": SPECS["env"].fact.spec_hash,
        "reward_fn_hash": SPECS["reward"].fact.spec_hash,
        "seed": 7,
        "max_steps": 10,
        "creation_timestamp": "2026-01-01T00:00:00Z",
        **changes,
    }
    return RequestFact.model_validate(value)


@dataclass
class World:
    """The servers, a bus of the test's own, and what was published so far."""

    nats_url: str
    database_url: str
    bus: Bus
    history: History
    folder: Path
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[tuple[Message, Event]] = field(default_factory=list)
    processes: list[Forked] = field(default_factory=list)
    tasks: list[tuple[asyncio.Task[None], asyncio.Event]] = field(default_factory=list)
    beats: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    named: dict[str, list[UUID]] = field(default_factory=dict)

    # -- processes -----------------------------------------------------------------------------

    def start(self, service: str, config: str = CONFIG) -> Forked:
        """Start a service as a process."""
        path = self.folder / f"config-{len(self.processes)}.yaml"
        path.write_text(config)
        environment = {
            **os.environ,
            "DSEC_NATS_URL": self.nats_url,
            "DSEC_DATABASE_URL": self.database_url,
            "DSEC_SCHEDULER_CONFIG": str(path),
        }
        process = forked.start(f"dsec.{service}.__main__", env=environment)
        self.processes.append(process)
        return process

    def lead(self, config: str = CONFIG) -> None:
        """Run a scheduler in this process."""
        path = self.folder / f"config-{len(self.tasks)}.yaml"
        path.write_text(config)
        settings = Settings(nats_url=self.nats_url, database_url=self.database_url)
        stop, loaded = asyncio.Event(), load_config(path)

        async def served() -> None:
            lost = True
            while lost:
                lost = False
                try:
                    await serve(settings, loaded, stop)
                except* LeadershipLost:  # of a process that stood still: it is started anew
                    lost = True

        self.tasks.append((asyncio.create_task(served()), stop))

    async def led(self) -> None:
        """Wait until a scheduler follows the stream."""
        async with asyncio.timeout(WAIT_S_MAX):
            while CONSUMER not in {s.name for s in await self.bus.consumers()}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def record(self) -> None:
        """Run the recorder in this process, so that the log grows."""
        settings = RecorderSettings(nats_url=self.nats_url, database_url=self.database_url)
        stop = asyncio.Event()
        recording = Recorder(self.bus, settings, utc_now).run(stop)
        self.tasks.append((asyncio.create_task(recording), stop))

    def nats_server(self) -> psutil.Process:
        """The process of the server."""
        port = int(self.nats_url.rpartition(":")[2])
        for child in psutil.Process().children(recursive=True):
            if any(one.laddr.port == port and not one.raddr for one in child.net_connections()):
                return child
        raise AssertionError(f"nobody listens on {port}")

    def sql(self, query: str, **parameters: Any) -> list[dict[str, Any]]:
        """Rows of a query."""
        with psycopg.connect(self.database_url, row_factory=dict_row) as connection:
            return connection.execute(query, parameters).fetchall()  # type: ignore[arg-type]

    # -- what a client does --------------------------------------------------------------------

    async def publish(self, event: Event, key: object, **options: Any) -> int:
        """Publish an event; the id is the test's own."""
        options.setdefault("event_id", str(uuid_utils.uuid4()))
        return await self.bus.publish(event, key, source="test", time=utc_now(), **options)

    def spec(self, kind: Any, document: dict[str, Any]) -> SpecRegistered:
        """A spec that nobody has registered yet."""
        return spec_event(kind, document)

    async def register(self) -> None:
        """Register the specs that `request_fact` names."""
        for spec in SPECS.values():
            await self.publish(spec, spec.fact.spec_hash)

    async def request(self, **changes: Any) -> RequestFact:
        """Ask for a session."""
        fact = request_fact(**changes)
        await self.publish(SessionRequested(fact=fact), fact.session_id)
        return fact

    # -- what a worker does --------------------------------------------------------------------

    def worker(self, name: str, *, capacity: int = 100, isolated: bool = False) -> None:
        """A worker that beats until it is silenced."""
        fact = HeartbeatFact(
            worker=name,
            node="node",
            state="ready",
            lanes=[f"{name}-0", f"{name}-1"],
            capacity_sessions=capacity,
            isolated=isolated,
        )
        self.beats[name] = asyncio.create_task(self._beat(fact))

    def silence(self, name: str) -> None:
        """The worker beats no more."""
        self.beats.pop(name).cancel()

    def dies(self, name: str, reason: Any, culprit: Culprit | None = None) -> None:
        """Its supervisor says that the worker is dead."""
        self.silence(name)
        fact = HeartbeatFact(
            worker=name, node="node", state="dead", death=reason, culprit=culprit, detail="test"
        )
        self.beats[f"{name}, dead"] = asyncio.create_task(self._beat(fact))

    async def _beat(self, fact: HeartbeatFact) -> None:
        while True:
            # A worker that names what it has, where the test says what that is.
            has = self.named.get(fact.worker)
            told = HeartbeatCircumstance(
                sessions=has or [],
                attempts=[1] * len(has or []),
                sessions_total=None if has is None else len(has),
            )
            await self.bus.publish_transient(
                WorkerHeartbeat(fact=fact, circumstance=told),
                fact.worker,
                source="test",
                time=utc_now(),
                event_id=str(uuid_utils.uuid4()),
            )
            await asyncio.sleep(BEAT_S)

    async def starts(self, placed: SessionPlaced) -> bytes:
        """The worker resets the environment; returns chain_0."""
        chain = bytes(range(32))
        fact = StartedFact(session_id=placed.fact.session_id, reset=b"r", chain=chain)
        await self.publish(
            SessionStarted(fact=fact),
            fact.session_id,
            session_id=fact.session_id,
            fence=placed.fact.worker,
        )
        return chain

    # -- what is seen --------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keep everything that the stream holds."""
        consumer = await self.bus.consumer("test", ["dsec.>"], ack="none")
        while True:
            for message in await consumer.fetch(500, 0.5):
                with contextlib.suppress(Exception):
                    self.seen.append((message, message.event()))
                    continue
                self.seen.append((message, Event()))

    async def until(self, holds: Callable[[], Any], timeout_s: float = WAIT_S_MAX) -> Any:
        """Wait until `holds()`; fails the test otherwise."""
        async with asyncio.timeout(timeout_s):
            while not (found := holds()):  # noqa: ASYNC110 - the log has no event to wait for
                await asyncio.sleep(0.02)
            return found

    def events(self, kind: type[Any], **of: Any) -> list[Any]:
        """Events of a kind whose facts match."""
        return [
            event
            for _, event in self.seen
            if isinstance(event, kind)
            and all(getattr(event.fact, name) == value for name, value in of.items())
        ]

    async def placed(
        self, session_id: UUID, attempt: int = 1, timeout_s: float = WAIT_S_MAX
    ) -> Any:
        """The placement of a session."""
        found = await self.until(
            lambda: self.events(SessionPlaced, session_id=session_id, attempt=attempt), timeout_s
        )
        assert len(found) == 1, "a session was placed twice under one attempt"
        return found[0]

    async def ended(self, session_id: UUID, timeout_s: float = WAIT_S_MAX) -> SessionEnded:
        """The end of a session."""
        found = await self.until(
            lambda: self.events(SessionEnded, session_id=session_id), timeout_s
        )
        return found[0]  # type: ignore[no-any-return]

    async def logged(self, session_id: UUID, key: str = keys.REQUESTED) -> None:
        """Wait until the log has an event."""
        query = "select 1 from event_log where session_id = %(id)s and key = %(key)s"
        await self.until(lambda: self.sql(query, id=session_id, key=key))


async def _empty(nats_url: str) -> None:
    connection = await nats.connect(nats_url)
    js = connection.jetstream()
    for stream in ("DSEC", "KV_dsec_lease_scheduler"):
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await js.delete_stream(stream)
    await connection.close()


@pytest.fixture
async def world(nats_url: str, log_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """An empty stream, an empty log and a recorder; no scheduler yet."""
    await _empty(nats_url)
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    history = History.connect(log_url)
    world = World(nats_url, log_url, bus, history, tmp_path)
    world.record()
    follower = asyncio.create_task(world.follow())
    await world.register()
    try:
        yield world
        assert not follower.done(), f"nothing was seen any more: {follower.exception()!r}"
        for task, _ in world.tasks:
            assert not task.done() or world.stop.is_set(), task.exception()
    finally:
        for _, stop in world.tasks:
            stop.set()
        world.stop.set()
        await asyncio.wait([task for task, _ in world.tasks], timeout=5)
        for task in (follower, *world.beats.values()):
            task.cancel()
        for process in world.processes:
            process.kill()
            process.wait()
        await history.close()
        await bus.close()
        await _empty(nats_url)
