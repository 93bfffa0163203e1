"""One run: services, network, server and database in virtual time, and what happens to them."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import nats.errors
from sqlalchemy.exc import SQLAlchemyError
from tests.simulation import programs
from tests.simulation.bus import connect
from tests.simulation.clock import START_NS, Process, Stuck, VirtualLoop, virtual_clocks
from tests.simulation.faults import CrashPoint, Fault, Plan
from tests.simulation.log import Database
from tests.simulation.market import short_memory
from tests.simulation.network import Network
from tests.simulation.services import SERVICES
from tests.simulation.stream import Server
from tests.simulation.switches import Switches
from tests.simulation.upstream import Session, cancelling, requesting
from tests.simulation.workers import WorkerHandle, pretended

from dsec.platform.bus import Bus, BusError
from dsec.platform.log import LogBehind, LogUnavailable
from dsec.scheduler.handlers import DeliveryLost
from dsec.scheduler.leadership import LeadershipLost
from dsec.scheduler.recovery import LogNotReady
from dsec.tool.call import Tool
from dsec_contracts import keys
from dsec_contracts.session import RequestFact

RUN_S_MAX = 400.0
"""A session that has not ended by then never will."""
LOOK_S = 0.25
RESPAWN_S = 0.3
ORDINARY = (
    BusError,
    nats.errors.Error,
    OSError,
    TimeoutError,
    LeadershipLost,
    DeliveryLost,
    LogNotReady,
    LogUnavailable,
    LogBehind,
    SQLAlchemyError,
)
"""What a process may end with when something is away; it is started anew."""


class World:
    """Everything there is in one run."""

    def __init__(self, seed: int, plan: Plan, switches: Switches) -> None:
        self.plan = plan
        self.loop = VirtualLoop()
        self.chance = random.Random(f"run {seed}")
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.tools: dict[str, Tool] = {}
        self.folders: list[Path] = []
        self.handles: dict[int, WorkerHandle] = {}
        self.processes: list[Process] = []
        self.kills = 0
        self._names: Counter[str] = Counter()
        self._asked: Counter[tuple[str, str]] = Counter()
        self._crash_points: set[CrashPoint] = set(plan.crash_points)
        self.server = Server(self.loop, switches, plan.duplicate_window_s)
        self.network = Network(
            self.loop, self.server, self.chance, plan.weather, self.trace, self.boundary
        )
        self.database = Database(
            self.loop,
            self.chance,
            switches,
            self.trace,
            self.boundary,
            lost_commits_share=plan.lost_commits_share,
        )
        self.sessions = [self._session(n, *told) for n, told in enumerate(plan.sessions)]

    def _session(self, number: int, kind: int, seed: int, max_steps: int) -> Session:
        chosen = programs.KINDS[kind]
        milliseconds = START_NS // 1_000_000 + number
        session_id = UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62 | number + 1)
        request = RequestFact(
            session_id=session_id,
            agent_spec=chosen.agent[0],
            env_spec=programs.ENV_SPEC[0],
            reward_fn_hash=chosen.reward[0],
            seed=seed,
            max_steps=max_steps,
            creation_timestamp="2026-01-01T00:00:00Z",
            **dict(chosen.options),
        )
        return Session(chosen, request)

    # -- what the parts ask --------------------------------------------------------------------

    def now(self) -> datetime:
        """The wall clock."""
        return self.loop.now

    def trace(self, line: str) -> None:
        """Note what happened."""
        self.lines.append(f"{self.loop.time():9.4f}  {line}")

    def new_name(self, kind: str) -> str:
        """A name that nothing had before."""
        self._names[kind] += 1
        return f"{kind}{self._names[kind]}"

    def work_s(self) -> float:
        """How long some work takes."""
        return self.chance.uniform(0.0001, self.plan.work_s_max)

    def boundary(self, process: Process, what: str, when: str) -> bool:
        """A process is about to ask for something, or it was done. True: it is dead now."""
        self._asked[process.kind, when] += 1
        if process.dead or not self._crash_points:
            return process.dead
        point = CrashPoint(process.kind, self._asked[process.kind, when], when)
        if point in self._crash_points:
            self._crash_points.discard(point)
            self.trace(f"{process} DIES {when} {what}")
            self.kills += 1
            process.die()
        return process.dead

    # -- processes -----------------------------------------------------------------------------

    def start(self, kind: str) -> None:
        """Start a service. Whenever it ends it is started anew."""
        process = Process(self.new_name(kind), kind)
        process.on_death.append(lambda: self.loop.later(RESPAWN_S, self.start, kind))
        self.run(process, SERVICES[kind](self, process))

    def run(self, process: Process, main: Coroutine[Any, Any, Any]) -> None:
        """Run a process to its end."""
        self.processes.append(process)
        self.trace(f"{process} starts")

        def ended(task: asyncio.Task[Any]) -> None:
            if process.dead or self._closing:
                return
            error = None if task.cancelled() else task.exception()
            self.trace(f"{process} ends: {error!r}")
            for one in _single(error):
                if not isinstance(one, ORDINARY):
                    self.errors.append(f"{process} fell: {one!r}")
            process.die()

        task = self.loop.spawn(process, main)
        task.add_done_callback(ended)
        # Told by the world and not in the process, which may be stopped by then.
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    def living(self, kind: str) -> list[Process]:
        """The processes of a kind that are not dead."""
        return [p for p in self.processes if p.kind == kind and not p.dead]

    def happen(self, fault: Fault) -> None:
        """Something goes wrong."""
        self.trace(f"FAULT {fault}")
        loop, server, database = self.loop, self.server, self.database
        match fault.what:
            case "kill" | "stop" | "mute" | "deaf":
                living = self.living(fault.who)
                if not living:
                    return
                process = self.chance.choice(living)
                self.trace(f"      it is {process}")
                if fault.what == "kill":
                    self.kills += 1
                    process.die()
                elif fault.what == "mute":
                    process.mute_until_s = loop.time() + fault.for_s
                elif fault.what == "deaf":
                    process.deaf_until_s = loop.time() + fault.for_s
                else:
                    process.stop()
                    loop.later(fault.for_s, process.go_on, loop)
            case "bus_away":
                server.away = True
                loop.later(fault.for_s, setattr, server, "away", False)
            case "database_away":
                database.go_away()
                loop.later(fault.for_s, database.come_back)
            case "stream_full":
                server.refusing = True
                loop.later(fault.for_s, setattr, server, "refusing", False)
            case "cancel":
                session = self.sessions[int(fault.who)]
                session.cancelled = True
                self._client("canceller", cancelling(session))

    # -- upstream ------------------------------------------------------------------------------

    def _client(self, name: str, work: Callable[[World, Bus], Coroutine[Any, Any, None]]) -> None:
        process = Process(self.new_name(name), name)
        self.processes.append(process)
        self.loop.spawn(process, work(self, connect(self.network, process)))

    # -- the run -------------------------------------------------------------------------------

    def _over(self) -> bool:
        """Every session has its end in the log, and the log has all of the stream."""
        database, server = self.database, self.server
        if not all(database.get(s.request.session_id, keys.ENDED) for s in self.sessions):
            return False
        floor = database.floor()
        others = ("dsec.fence.", "dsec.dead.")
        logged = (s.sequence for s in reversed(server.archive) if not s.subject.startswith(others))
        return floor is not None and floor["sequence"] >= next(logged, 0)

    def _look(self) -> None:
        if self._over() or self.loop.time() > RUN_S_MAX or self.errors:
            self.loop.stop()
        else:
            self.loop.later(LOOK_S, self._look)

    def live(self) -> None:
        """Run until every session has ended, or never will."""
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(self._unhandled)
        try:
            with (
                virtual_clocks(self.loop, self.chance),
                programs.kept(),
                pretended(self.handles),
                short_memory(),
            ):
                for kind in SERVICES:
                    self.start(kind)
                for kind in self.plan.standby:
                    self.start(kind)
                self._client("upstream", requesting)
                for fault in self.plan.faults:
                    self.loop.later(fault.at_s, self.happen, fault)
                self.loop.later(LOOK_S, self._look)
                try:
                    self.loop.run_forever()
                except Stuck as stuck:
                    self.errors.append(f"stuck: {stuck}")
                self._close()
        finally:
            asyncio.set_event_loop(None)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self._closing and not isinstance(error, ORDINARY):
            self.errors.append(f"unhandled: {context.get('message')}: {error!r}")

    _closing = False

    def _close(self) -> None:
        self._closing = True
        self.server.away = True
        for process in self.processes:
            process.on_death.clear()
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        self.loop.bury(self.processes)
        logging.disable(before)
        self.loop.close()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def _single(error: BaseException | None) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [one for part in error.exceptions for one in _single(part)]
    return [] if error is None else [error]
