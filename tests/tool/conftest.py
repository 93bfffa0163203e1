"""Tools from a few lines of source, and replicas of the service among real servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import textwrap
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

from dsec.platform.bus import Bus, Message
from dsec.platform.clock import utc_now
from dsec.recorder.leadership import Recorder
from dsec.recorder.settings import RecorderSettings
from dsec.session.documents import ToolDocument, seal
from dsec.tool.processes import Program
from dsec_contracts import (
    Event,
    SpecRegistered,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    decode,
    encode,
    keys,
)
from dsec_contracts.spec import SpecFact
from dsec_contracts.tool import (
    ToolCall,
    ToolCalledCircumstance,
    ToolCalledFact,
    ToolFunction,
    ToolUse,
)

WAIT_S_MAX = 60.0
SESSION = UUID("019cade2-11c0-7001-9f3a-5c7e9b2d5791")


def spec_of(body: str = "def tool(): return 1", **options: Any) -> tuple[str, bytes]:
    """Hash and content of a Python tool whose file has this source and defines `tool`."""
    document = ToolDocument(name="tool", entry="tool.py:tool", **options)
    return seal("tool", document, {"tool.py": textwrap.dedent(body).encode()})


def program_of(body: str, values: dict[str, str] | None = None, **options: Any) -> Program:
    """What a calling process is given of such a tool."""
    return Program(*spec_of(body, **options), values or {})


@dataclass
class Rig:
    """A lane that calls tools, a log that grows, and replicas of the service."""

    bus: Bus
    nats_url: str
    database_url: str
    folder: Path
    replicas: list[Forked] = field(default_factory=list)
    answers: list[tuple[Message, ToolReturned | ToolFailed]] = field(default_factory=list)
    sent: int = 0

    def start(self, **settings: object) -> Forked:
        """Start a replica. It has little patience unless the test says otherwise."""
        name = f"r{len(self.replicas)}"
        told = {"ack_wait_s": 1, "unknown_grace_s": 0.5, "absent_s_max": 1} | settings
        env = os.environ | {
            "DSEC_NATS_URL": self.nats_url,
            "DSEC_DATABASE_URL": self.database_url,
            "DSEC_TOOL_REPLICA": name,
            **{
                f"DSEC_{'' if key.startswith('object_') else 'TOOL_'}{key.upper()}": str(value)
                for key, value in told.items()
            },
        }
        process = forked.start("dsec.tool.__main__", env=env, log=self.folder / f"{name}.log")
        self.replicas.append(process)
        return process

    async def publish(self, event: Event, key: object, **options: Any) -> int:
        """Publish an event under an id of its own."""
        self.sent += 1
        return await self.bus.publish(
            event, key, source="test", time=utc_now(), event_id=f"test.{self.sent}", **options
        )

    async def know(self, *specs: tuple[str, bytes]) -> None:
        """Register tools."""
        for spec_hash, content in specs:
            fact = {"spec_hash": spec_hash, "kind": "tool", "content": content}
            await self.publish(SpecRegistered(fact=SpecFact.model_validate(fact)), spec_hash)

    async def call(
        self,
        *specs: str,
        step: int = 0,
        deadline_s: float = 20.0,
        again: bool = False,
        arguments: str = "{}",
        lane: str = "lane",
        calls_before: int = 0,
        session_id: UUID = SESSION,
        **told: Any,
    ) -> None:
        """One turn with a call of each spec."""
        names = {f"t{n}": spec for n, spec in enumerate(specs)}
        fact = ToolCalledFact(
            session_id=session_id,
            step=step,
            turn=0,
            inputs=encode([]),
            calls=[
                ToolCall(
                    id=keys.call_id(step, 0, n),
                    function=ToolFunction(name=name, arguments=arguments),
                )
                for n, name in enumerate(names)
            ],
            turn_hash=bytes([step]) * 16,
        )
        uses = {
            n: ToolUse(spec=spec, deadline_s=deadline_s, calls_before=calls_before)
            for n, spec in names.items()
        }
        circumstance = ToolCalledCircumstance(lane=lane, again=again, tools=uses, **told)
        event = ToolCalled(fact=fact, circumstance=circumstance)
        await self.publish(event, session_id, session_id=session_id)

    async def follow(self) -> None:
        """Keep all answers."""
        filters = ["dsec.tool.returned.*", "dsec.tool.failed.*"]
        consumer = await self.bus.consumer("test", filters, ack="none")
        while True:
            for message in await consumer.fetch(100, 0.5):
                event = message.event()
                assert isinstance(event, (ToolReturned, ToolFailed))
                self.answers.append((message, event))

    async def answered(self, count: int = 1) -> list[Any]:
        """Results, or codes of failures, in the order of the calls, once there are so many."""
        await self.until(lambda: len(self.answers) >= count)
        events = sorted((event for _, event in self.answers), key=lambda event: event.fact.index)
        return [
            decode(event.fact.content) if isinstance(event, ToolReturned) else event.fact.code
            for event in events
        ]

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until `holds()`; fails the test otherwise, with what the replicas logged."""
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                while not holds():  # noqa: ASYNC110 - others publish, nothing notifies
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logs = "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))
            raise AssertionError(f"{self.answers}\n{logs}") from None

    def effects(self) -> list[str]:
        """What tools have written into the file that `effect` names."""
        path = self.folder / "effects"
        return path.read_text().splitlines() if path.exists() else []

    def effect(self, rest: str = "", **options: Any) -> tuple[str, bytes]:
        """A tool that leaves a trace before it does the rest."""
        body = (
            "import os, time\n"
            "def tool(*, idempotency_key):\n"
            f"    with open({str(self.folder / 'effects')!r}, 'a') as file:\n"
            "        file.write(idempotency_key + '\\n')\n"
            f"    {rest or 'pass'}\n"
            "    return 'done'\n"
        )
        return spec_of(body, **options)

    async def settled(self) -> None:
        """Wait until the durable has nothing left."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                states = {state.name: state for state in await self.bus.consumers()}
                state = states.get("tool")
                if state is not None and state.pending + state.ack_pending == 0:
                    return
                await asyncio.sleep(0.05)


@pytest.fixture
async def rig(nats_url: str, log_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    """An empty stream, an empty log and its recorder; no replica yet."""
    connection = await nats.connect(nats_url)
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await connection.jetstream().delete_stream("DSEC")
    await connection.close()
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    made, stop = Rig(bus, nats_url, log_url, tmp_path), asyncio.Event()
    settings = RecorderSettings(nats_url=nats_url, database_url=log_url)
    recorder = asyncio.create_task(Recorder(bus, settings, utc_now).run(stop))
    following = asyncio.create_task(made.follow())
    yield made
    for process in made.replicas:
        process.kill()
        process.wait()
    stop.set()
    pending = {recorder, following}
    while pending:  # the client may lose a cancellation that comes with a message
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)
    await bus.close()
