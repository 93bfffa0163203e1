"""The real services, composed as their `__main__` does it, on simulated parts.

What is left out of each is what cannot be simulated: FastStream's pull loop (`pump` is what it is
configured to be, one message after the other), the processes that run rewards and tools (here they
run in place, between two waits), and signals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.bus import connect
from tests.simulation.clock import Process
from tests.simulation.history import SchedulersHistory
from tests.simulation.log import Reader
from tests.simulation.market import Market
from tests.simulation.recording import BesideConnection, RecordersWriter
from tests.simulation.workers import node

from dsec.platform.bus import Bus, Message
from dsec.platform.specs import Patience, spec_source
from dsec.platform.telemetry import OFF
from dsec.recorder.leadership import Recorder
from dsec.recorder.settings import RecorderSettings
from dsec.reward.asking import Outsides
from dsec.reward.declarations import Declarations, declaration_source
from dsec.reward.effects import Keep, Specs
from dsec.reward.frames import Outcome as RewardOutcome
from dsec.reward.frames import Task
from dsec.reward.handlers import CONSUMER as REWARD
from dsec.reward.handlers import Rewarder
from dsec.reward.isolation import Isolation
from dsec.reward.recheck import Recheck
from dsec.reward.scoring_process import Scorers
from dsec.reward.settings import RewardSettings
from dsec.reward.waiting import Beside
from dsec.scheduler.__main__ import lead
from dsec.scheduler.leadership import LEASE_NAME, LEASE_TTL_S, Leadership
from dsec.scheduler.settings import SchedulerConfig
from dsec.tool.call import Tool, load
from dsec.tool.effects import Tools, memory_of
from dsec.tool.frames import Order, Outcome
from dsec.tool.handlers import CONSUMER as TOOL
from dsec.tool.handlers import Caller
from dsec.tool.processes import Program
from dsec.tool.settings import ToolSettings
from dsec_contracts import SessionStepped, ToolCalled, subjects

if TYPE_CHECKING:
    from tests.simulation.world import World

FETCH_WAIT_S = 5.0

SCHEDULER = SchedulerConfig.model_validate(
    {
        "heartbeat_period_s": 0.5,
        "heartbeat_limit_s": 1.5,
        "session_absent_limit_s": 10.0,
        "curriculum": {
            "lag_steps_high": 1,
            "lag_steps_low": 1,
            "lag_s": 0.4,
            "recover_s": 0.4,
            "transition_episodes": 1,
            "return_target": 1.0,
        },
        "curriculum_transition_threshold": 0.1,
    }
)
RECORDER = RecorderSettings.model_validate(
    {
        "fetch_wait_s": 0.25,
        "retry_wait_s_max": 1.0,
        "standby_poll_s": 0.5,
        "trim_period_s": 0.5,
        "stall_limit_s": 3.0,
        "heartbeat_write_s": 5.0,
    }
)
REWARDS = RewardSettings()
TOOLS = ToolSettings(tool_unknown_grace_s=1.0, tool_log_wait_s=5.0)


async def pump(
    bus: Bus,
    durable: str,
    subject: str,
    handle: Callable[[Message], Awaitable[None]],
    wait_s: float,
) -> None:
    """One message of a durable after the other."""
    consumer = await bus.consumer(durable, [subject], ack_wait_s=wait_s)
    while True:
        for message in await consumer.fetch(1, FETCH_WAIT_S):
            await handle(message)


async def scheduler(world: World, process: Process) -> None:
    """A scheduler: stands by, leads."""
    bus = connect(world.network, process)
    await bus.await_stream()
    history = SchedulersHistory(world.database, process)
    lease = await bus.lease(LEASE_NAME, process.name, LEASE_TTL_S)
    leadership = Leadership(lease, world.loop.time)
    stop = asyncio.Event()
    if await leadership.take(stop):
        await lead(bus, history, SCHEDULER, leadership, OFF, stop)


async def recorder(world: World, process: Process) -> None:
    """A recorder: stands by, writes."""
    bus = connect(world.network, process)

    async def writer(_: str) -> RecordersWriter:
        return RecordersWriter(world.database, process)

    async def beside(_: str, __: str) -> Any:
        return BesideConnection(world.database, process)

    now = world.now
    settings = RECORDER.model_copy(update={"trim_keep_s": world.plan.trim_keep_s})
    await Recorder(bus, settings, now, open_writer=writer, open_beside=beside).run(asyncio.Event())


# -- reward ------------------------------------------------------------------------------------


class InPlaceFunctions:
    """Reward functions, run by what runs them in the scoring process."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scorers = _SCORERS

    async def score(
        self, tasks: Sequence[Task], contents: Mapping[str, bytes]
    ) -> list[RewardOutcome]:
        """The outcome of every row."""
        self._scorers.add(dict(contents))
        await asyncio.sleep(self._world.work_s())
        return [self._scorers.score(task) for task in tasks]


_SCORERS = Scorers()
"""Functions of their transition alone: what one run has loaded is the next one's, too."""


async def reward(world: World, process: Process) -> None:
    """A replica of the reward service."""
    settings = REWARDS.model_copy(update={"reward_replica": process.name})
    bus = connect(world.network, process)
    await bus.await_stream()
    reader = Reader(world.database, process)
    source = spec_source(reader, None, "reward", settings.reward_spec_wait_s)
    patience = Patience(settings.reward_absent_s_max, world.loop.time)
    specs = Specs(source, patience=patience, kept_max=settings.reward_specs_max)
    functions = InPlaceFunctions(world)
    declared = declaration_source(reader, settings.reward_spec_wait_s)
    market: Any = Market(world, process)
    outsides = Outsides(
        bus,
        Declarations(declared, patience, world.loop.time),
        process.name,
        {},
        lambda: world.loop.now_ns / 1e9,
        lambda: market,
    )
    # What is scored again is scored in a process of its own, of which there is none here.
    recheck = Recheck(_no_process, world.loop.time, period_s=0.0)
    beside = Beside(outsides, Keep(None), recheck)
    rewarder = Rewarder(bus, specs, functions, _no_blobs, settings, world.now, beside=beside)
    subject = subjects.every(SessionStepped.event_name())
    await pump(bus, REWARD, subject, rewarder.on_session_stepped, settings.reward_ack_wait_s)


def _no_process() -> Isolation:
    raise AssertionError("nothing is scored again here")


def _no_blobs(key: str) -> bytes:
    raise AssertionError(f"no observation here is large: {key}")


# -- tools -------------------------------------------------------------------------------------


class InPlaceCalls:
    """Calling processes, run by what runs in them. It dies with the service."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    async def take(self, program: Program) -> Program:
        """A process for a call."""
        await asyncio.sleep(self._world.work_s())
        return program

    async def give_back(self, program: Program) -> None:
        """It was not needed."""

    async def call(
        self, program: Program, order: Order, deadline_s: float, stop_s: float = 0.0
    ) -> Outcome:
        """Make a call. One that is given up ends at once, whatever time it has for that."""
        await asyncio.sleep(self._world.work_s())
        if self._process.dead:
            await self._world.loop.create_future()
        tool = self._world.tools.get(program.spec_hash)
        if tool is None:
            found = load(program.spec_hash, program.content, program.secrets)
            assert isinstance(found, Tool)
            tool = self._world.tools[program.spec_hash] = found
        self._world.calls.append((program.spec_hash, order.key))
        outcome = tool.call(order)
        await asyncio.sleep(self._world.work_s())
        return outcome


async def tool(world: World, process: Process) -> None:
    """A replica of the tool service."""
    settings = TOOLS.model_copy(update={"tool_replica": process.name})
    bus = connect(world.network, process)
    await bus.await_stream()
    reader = Reader(world.database, process)

    async def last_said() -> int:
        return await bus.last_sequence(subjects.TOOL)

    tools = Tools(
        spec_source(reader, None, "tool", settings.tool_log_wait_s),
        {},
        patience=Patience(settings.tool_absent_s_max, world.loop.time),
        kept_max=settings.tool_specs_max,
    )
    past = memory_of(reader, last_said, settings.tool_log_wait_s)
    calls: Any = InPlaceCalls(world, process)
    caller = Caller(bus, tools, past, calls, settings, world.now)
    subject = subjects.every(ToolCalled.event_name())
    await pump(bus, TOOL, subject, caller.on_tool_called, settings.tool_ack_wait_s)


SERVICES = {
    "scheduler": scheduler,
    "recorder": recorder,
    "reward": reward,
    "tool": tool,
    "node": node,
}
"""What runs, by name. Workers are their node's."""
