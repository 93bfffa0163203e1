"""Workers and lanes among real servers. The test plays the scheduler and the reward service, and
looks at what was published."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
import textwrap
import types
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import nats
import nats.js.errors
import pytest
import uuid_utils

from dsec.env_runtime.lane import Lane
from dsec.env_runtime.packing import Sender
from dsec.env_runtime.replies import feed
from dsec.env_runtime.running import Running, RunningSlot
from dsec.env_runtime.seats import Seat
from dsec.env_runtime.settings import EnvRuntimeSettings
from dsec.env_runtime.worker import Worker
from dsec.platform.bus import Bus, Message
from dsec.platform.clock import utc_now
from dsec.platform.log import LogReader
from dsec.platform.objects import ObjectStore
from dsec.platform.stack.nats_server import NatsServerOptions, nats_server_process
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess
from dsec.recorder.leadership import Recorder
from dsec.recorder.settings import RecorderSettings
from dsec.replay.verify import Verdict, verify
from dsec.session.documents import AgentDocument, EnvDocument, RewardDocument, seal
from dsec.session.io import Ended
from dsec.session.machine import SessionMachine
from dsec.session.program import load_program, session_config
from dsec_contracts import (
    Event,
    RewardScored,
    SessionCancelRequested,
    SessionEnded,
    SessionPlaced,
    SessionReleased,
    SessionStepped,
    SpecRegistered,
    encode,
)
from dsec_contracts.columns import VarColumn, fixed_rows
from dsec_contracts.reward import RewardColumns
from dsec_contracts.session import CancelFact, PlacedCircumstance, PlacedFact, RequestFact
from dsec_contracts.spec import SpecFact

WAIT_S_MAX = 60.0
PAYLOAD_BYTES_MAX = 20_000
"""What the small server takes."""

AGENT = """
class Agent:
    def __init__(self, config):
        pass
    def step(self, observation):
        return {"action": 0}
"""
ENV = """
import gymnasium, numpy as np
class Env(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    def __init__(self, size=4, info_bytes=0, at_step=0):
        self.size, self.info_bytes, self.at_step, self.n = size, info_bytes, at_step, 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return np.full(self.size, 0.5, np.float32), {}
    def step(self, action):
        self.n += 1
        info = {"b": b"i" * self.info_bytes} if self.n > self.at_step and self.info_bytes else {}
        return np.full(self.size, self.n, np.float32), 1.0, False, False, info
"""
REWARD_SPEC = seal("reward", RewardDocument(), {})


def uuid7() -> UUID:
    """A new session id."""
    return UUID(str(uuid_utils.uuid7()))


class Code(NamedTuple):
    """The two sealed specs of a program: hash and content."""

    agent: tuple[str, bytes]
    env: tuple[str, bytes]


def code_of(agent: str = AGENT, env: str = ENV, **options: Any) -> Code:
    """The specs of a program. Options go into the documents that have them."""
    in_agent = {k: v for k, v in options.items() if k in AgentDocument.model_fields}
    env_only = EnvDocument.model_fields.keys() - AgentDocument.model_fields.keys()
    in_env = {k: v for k, v in options.items() if k in env_only}
    documents = (
        AgentDocument(entry="agent.py:Agent", **in_agent),
        EnvDocument(entry="env.py:Env", **in_env),
    )
    return Code(
        seal("agent", documents[0], {"agent.py": textwrap.dedent(agent).encode()}),
        seal("env", documents[1], {"env.py": textwrap.dedent(env).encode()}),
    )


def request_of(code: Code, **changes: Any) -> RequestFact:
    """A request for a session of a program."""
    value = {
        "session_id": uuid7(),
        "agent_spec": code.agent[0],
        "env_spec": code.env[0],
        "reward_fn_hash": REWARD_SPEC[0],
        "seed": 7,
        "max_steps": 5,
        "creation_timestamp": "2026-01-01T00:00:00Z",
    }
    return RequestFact.model_validate(value | changes)


class Row(NamedTuple):
    """One published step."""

    message: Message
    lane: str
    session_id: UUID
    attempt: int
    step: int
    chain: bytes
    fact: bytes
    observation: bytes
    prior: bytes
    reset_observation: bytes


def rows_of(message: Message, event: SessionStepped) -> list[Row]:
    """The steps of a tick."""
    columns, n = event.row, event.rows
    return [
        Row(message, event.circumstance.lane, UUID(bytes=raw_id), *rest)
        for raw_id, *rest in zip(
            fixed_rows(columns.session_id, 16),
            struct.unpack(f"<{n}i", columns.attempt),
            struct.unpack(f"<{n}i", columns.step),
            fixed_rows(columns.chain, 32),
            columns.fact.unpack(),
            columns.observation.unpack(),
            columns.prior.unpack(),
            columns.reset_observation.unpack(),
            strict=True,
        )
    ]


@dataclass
class Wire:
    """A bus of the test's own, what was published on it so far, and a reward service."""

    url: str
    bus: Bus
    folder: Path
    seen: list[tuple[Message, Event]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    answering: bool = False
    """Whether every step is rewarded as it is seen."""
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside the test, until its end at most."""
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def follow(self) -> None:
        """Keep all that is published."""
        consumer = await self.bus.consumer("test", ["dsec.session.>"], ack="none")
        while True:
            for message in await consumer.fetch(500, 0.5):
                event = message.event()
                self.seen.append((message, event))
                rows = rows_of(message, event) if isinstance(event, SessionStepped) else []
                self.rows += rows
                for row in rows if self.answering else []:
                    await self.reward(row)

    async def until(self, holds: Callable[[], Any], timeout_s: float = WAIT_S_MAX) -> Any:
        """Wait until `holds()`; fails the test otherwise."""
        async with asyncio.timeout(timeout_s):
            while not (found := holds()):  # noqa: ASYNC110 - others publish, nothing notifies
                await asyncio.sleep(0.01)
            return found

    def events(self, kind: type[Any], session_id: UUID) -> list[Any]:
        """Events of a kind about a session."""
        found = [event for _, event in self.seen if isinstance(event, kind)]
        return [event for event in found if event.fact.session_id == session_id]

    def steps(self, session_id: UUID) -> list[Row]:
        """The published steps of a session, those published again included."""
        return [row for row in self.rows if row.session_id == session_id]

    async def stepped(self, session_id: UUID, count: int) -> list[Row]:
        """The first `count` steps that were published."""
        found = await self.until(lambda: len(self.steps(session_id)) >= count)
        assert found
        return self.steps(session_id)

    async def ended(self, session_id: UUID) -> SessionEnded:
        """The end of a session."""
        return (await self.until(lambda: self.events(SessionEnded, session_id)))[0]  # type: ignore[no-any-return]

    async def released(self, session_id: UUID) -> SessionReleased:
        """The release of a session."""
        return (await self.until(lambda: self.events(SessionReleased, session_id)))[0]  # type: ignore[no-any-return]

    async def publish(self, event: Event, key: object, **options: Any) -> int:
        """Publish an event; the id is the test's own."""
        event_id = str(uuid_utils.uuid4())
        return await self.bus.publish(
            event, key, source="test", time=utc_now(), event_id=event_id, **options
        )

    async def reward(
        self,
        row: Row,
        *,
        value: float = 1.0,
        step: int | None = None,
        cause: bytes | None = None,
        lane: str | None = None,
    ) -> None:
        """Answer a step, or what the test says instead of it."""
        step = row.step if step is None else step
        cause = row.chain[:16] if cause is None else cause
        fact = encode([step, 1, value, {"env": [value, 1.0]}, cause])
        columns = RewardColumns(
            session_id=row.session_id.bytes,
            step=struct.pack("<i", step),
            revision=struct.pack("<i", 1),
            value=struct.pack("<d", value),
            cause=cause,
            fact=VarColumn.pack([fact]),
        )
        await self.publish(RewardScored(rows=1, row=columns), lane or row.lane)

    async def cancel(self, session_id: UUID) -> None:
        """Ask that a session end."""
        event = SessionCancelRequested(fact=CancelFact(session_id=session_id))
        await self.publish(event, session_id, session_id=session_id)


@dataclass
class WorkerRun:
    """A worker that runs as a task of this process."""

    worker: Worker
    slot: RunningSlot
    bus: Bus
    reader: LogReader
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def close(self) -> None:
        """End it as if its process had died."""
        await end([self.task])
        await self.reader.close()
        await self.bus.close()
        self.slot.close(remove=True)


@dataclass
class World(Wire):
    """A log beside the bus, a recorder once it is asked for, and workers."""

    database_url: str = ""
    runs: dict[str, WorkerRun] = field(default_factory=dict)
    codes: dict[str, Code] = field(default_factory=dict)
    recording: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self) -> None:
        """Run the recorder, so that the log grows."""
        settings = RecorderSettings(nats_url=self.url, database_url=self.database_url)
        self.spawn(Recorder(self.bus, settings, utc_now).run(self.recording))

    async def worker(
        self, name: str = "w1", kind: type[Worker] = Worker, **settings: Any
    ) -> WorkerRun:
        """Start a worker. It has one lane and little patience unless the test says otherwise."""
        impatient = {"lanes_per_worker": 1, "heartbeat_period_s": 0.2, "restart_wait_s": 5.0}
        told = EnvRuntimeSettings.model_validate(
            {"nats_url": self.url, "database_url": self.database_url} | impatient | settings
        )
        slot = RunningSlot(self.folder / name, told.sessions_per_worker_max, create=True)
        bus = await Bus.connect(self.url, name)
        reader = await LogReader.connect(told.database_url)
        objects = ObjectStore(told.object_store_url) if told.object_store_url else None
        worker = kind(name, told, bus, reader, objects, slot, isolated=False)
        stop = asyncio.Event()
        task = asyncio.create_task(worker.run(stop))
        self.runs[name] = WorkerRun(worker, slot, bus, reader, stop, task)
        consumers = {f"worker-{name}", *(f"lane-{lane}" for lane in worker._lanes)}
        async with asyncio.timeout(WAIT_S_MAX):
            while not consumers <= await self.consumers():  # noqa: ASYNC110 - the server's
                await asyncio.sleep(0.02)
        return self.runs[name]

    async def consumers(self) -> set[str]:
        """The durables that the server has."""
        return {state.name for state in await self.bus.consumers()}

    async def register(self, code: Code) -> None:
        """Register a program's specs, and the reward's."""
        for kind, (spec_hash, content) in zip(
            ("agent", "env", "reward"), (*code, REWARD_SPEC), strict=True
        ):
            fact = SpecFact.model_validate(
                {"spec_hash": spec_hash, "kind": kind, "content": content}
            )
            await self.publish(SpecRegistered(fact=fact), spec_hash)

    async def place(
        self, request: RequestFact, worker: str = "w1", attempt: int = 1, **changes: Any
    ) -> int:
        """Place a session on the first lane of a worker. Returns the position."""
        value = {
            "session_id": request.session_id,
            "attempt": attempt,
            "worker": worker,
            "lane": f"{worker}-0",
        }
        event = SessionPlaced(
            fact=PlacedFact.model_validate(value | changes),
            circumstance=PlacedCircumstance(request=request),
        )
        return await self.publish(event, request.session_id, session_id=request.session_id)

    async def run_session(self, code: Code | None = None, **request: Any) -> RequestFact:
        """Register a program and place a session of it."""
        code = code or code_of()
        await self.register(code)
        asked = request_of(code, **request)
        self.codes[str(asked.session_id)] = code
        await self.place(asked)
        return asked

    async def verdict(
        self, request: RequestFact, get_blob: Callable[[str], bytes] | None = None
    ) -> Verdict:
        """What verification says of a session, once all that is published now is logged."""
        reader = await LogReader.connect(self.database_url)
        await reader.wait_floor((await self.bus.stream_state()).last_sequence, WAIT_S_MAX)
        rows = await reader.rows(request.session_id)
        await reader.close()
        (agent, agent_content), (env, env_content) = self.codes[str(request.session_id)]
        program = load_program(agent, agent_content, env, env_content)
        config = session_config(request, program)
        return verify(rows, program, config, None, get_blob=get_blob)


@dataclass
class LaneRig(Wire):
    """One lane without a worker around it, with sessions that were made here."""

    running: RunningSlot = field(init=False)
    lane: Lane = field(init=False)
    stepping: asyncio.Task[None] = field(init=False)
    ends: list[tuple[Seat, Ended]] = field(default_factory=list)

    async def start(
        self,
        objects: ObjectStore | None = None,
        *,
        lane_wait_ms: float = 50,
        reply_wait_s: float = 60.0,
    ) -> None:
        """Make the lane and let it run and hear."""

        async def on_ended(seat: Seat, ended: Ended) -> None:
            self.ends.append((seat, ended))

        self.running = RunningSlot(self.folder / "slot", 100, create=True)
        self.lane = Lane(
            "w1-0",
            "w1",
            self.bus,
            self.running,
            objects,
            lane_wait_ms=lane_wait_ms,
            reply_wait_s=reply_wait_s,
            tick_slice_ms=25,
            on_ended=on_ended,
        )
        consumer = await self.bus.consumer("lane-w1-0", ["dsec.reward.scored.w1-0"], ack="none")
        self.stepping = self.spawn(self.lane.run())
        self.spawn(feed(self.lane, consumer))

    def seat(
        self, code: Code | None = None, *, reward_spec: str = "0" * 64, **request: Any
    ) -> Seat:
        """A started session that may join the lane."""
        code = code or code_of()
        asked = request_of(code, **request)
        program = load_program(*code.agent, *code.env)
        machine = SessionMachine(program, session_config(asked, program, wants_prior=True))
        machine.start()
        assert machine.ended is None, machine.ended
        index = len(self.lane.seats)
        self.running.assign(index, asked.session_id, 30.0)
        observations = program.env.observations
        placed = PlacedFact(session_id=asked.session_id, attempt=1, worker="w1", lane="w1-0")
        return Seat(
            asked,
            placed,
            index,
            machine,
            30.0,
            observations.inline_bytes_max,
            observations.above,
            Sender(asked.session_id.bytes, 1, b"", reward_spec),
        )


class Probe(types.ModuleType):
    """A module that user code may import: it notes whom the running slot names."""

    def __init__(self) -> None:
        super().__init__("probe")
        self.slot: RunningSlot
        self.notes: list[tuple[str, Running | None]] = []

    def note(self, where: str) -> None:
        """Called by user code."""
        self.notes.append((where, self.slot.read()))


PROBE = Probe()


@pytest.fixture
def probe() -> Probe:
    """See `Probe`. One for all: user code that is loaded keeps the one that it imported."""
    made = sys.modules.setdefault("probe", PROBE)
    assert isinstance(made, Probe)
    made.notes.clear()
    return made


async def empty(url: str) -> None:
    """No stream."""
    connection = await nats.connect(url)
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await connection.jetstream().delete_stream("DSEC")
    await connection.close()


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Bus]:
    """A bus with an empty stream."""
    await empty(url)
    bus = await Bus.connect(url, "test")
    await bus.ensure_stream()
    try:
        yield bus
    finally:
        await bus.close()
        await empty(url)


async def end(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel what still runs: the bus client may lose a cancellation that comes with a message."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)


@contextlib.asynccontextmanager
async def world_on(nats_url: str, database_url: str, folder: Path) -> AsyncIterator[World]:
    """An empty stream and an empty log; no recorder and no worker yet."""
    async with connected(nats_url) as bus:
        made = World(nats_url, bus, folder, database_url=database_url)
        made.spawn(made.follow())
        yield made
        made.recording.set()
        for run in made.runs.values():
            await run.close()
        await end(made.tasks)


@pytest.fixture
async def world(nats_url: str, log_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """See `world_on`."""
    async with world_on(nats_url, log_url, tmp_path) as made:
        yield made


@pytest.fixture
async def small_nats_url(tmp_path: Path) -> AsyncIterator[str]:
    """A server that takes small messages only."""
    log, port = tmp_path / "nats.log", free_port()
    options = NatsServerOptions(
        tmp_path / "nats", log, port, "for-tests-only", max_payload_bytes=PAYLOAD_BYTES_MAX
    )
    child = ChildProcess(nats_server_process(options))
    await child.wait_ready()
    yield options.url
    await child.stop()


@pytest.fixture
async def rig(nats_url: str, tmp_path: Path) -> AsyncIterator[LaneRig]:
    """An empty stream; the lane is started by the test."""
    async with connected(nats_url) as bus:
        made = LaneRig(nats_url, bus, tmp_path)
        made.spawn(made.follow())
        yield made
        await end(made.tasks)
