"""A whole embedded stack for a scenario: what `dsec up` starts, and its processes by what they are.

Sessions are written as the files that a user would write. Everything lies in a folder of its own
and is stopped at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from dsec.cli.services import service_commands, start
from dsec.client.client import Client
from dsec.platform.engine import async_engine
from dsec.platform.stack import Stack, StackOptions
from dsec.platform.stack.nats_server import NATS_SERVER
from dsec.platform.stack.nats_server import server_name as server_name_of
from dsec.platform.stack.state import Endpoints

WORKER, ISOLATED = "worker", "isolated worker"
SERVERS = (NATS_SERVER, "postgres")

LEANING = {
    "agent.py": """
class Agent:
    def __init__(self, session_config):
        pass

    def step(self, observation):
        return {"action": int(observation[2] > 0)}
""",
    "agent_spec.yaml": "entry: agent.py:Agent\n",
    "env_spec.yaml": "entry: gymnasium:CartPole-v1\n",
}
"""The files of a cheap session without end: CartPole, and an agent that leans with the pole."""


@dataclass(frozen=True)
class Rig:
    """A running stack."""

    directory: Path
    endpoints: Endpoints
    client: Client
    engine: AsyncEngine

    @property
    def state_dir(self) -> Path:
        """Where its servers keep their data."""
        return self.directory / "state"

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Its processes now, by what they are: `worker`, `reward`, `postgres`, ..."""
        found: dict[str, list[psutil.Process]] = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (name := _name(process.cmdline())) is not None:
                    found.setdefault(name, []).append(process)
        return found

    def nats_node(self, server_name: str) -> psutil.Process | None:
        """The node of a NATS cluster that has this name, if it runs."""
        for process in self.processes().get(NATS_SERVER, []):
            with contextlib.suppress(psutil.Error):
                config = Path(process.cmdline()[-1])
                if server_name_of(config.parent) == server_name:
                    return process
        return None

    def cpu_s(self) -> dict[str, float]:
        """CPU time of its processes so far, by what they are, in seconds."""
        total: dict[str, float] = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command, times = process.cmdline(), process.cpu_times()
                name = _name(command) or command[0].split("/")[-1].split(":")[0]
                total[name] = total.get(name, 0.0) + times.user + times.system
        return total

    def workers_memory_bytes(self) -> int:
        """Resident memory of its workers, together."""
        running = self.processes()
        return sum(p.memory_info().rss for p in running.get(WORKER, []) + running.get(ISOLATED, []))

    async def floor(self) -> int:
        """The recorder's floor: everything up to here is committed."""
        return await self.scalar("select sequence from log_floor order by epoch desc limit 1")

    async def scalar(self, query: str, **parameters: object) -> int:
        """The one number that a query gives; 0 for none."""
        async with self.engine.connect() as connection:
            found = await connection.execute(text(query), parameters)
            return int(found.scalar() or 0)


def _name(command: list[str]) -> str | None:
    if not command:
        return None
    if "--worker" in command:
        return ISOLATED if "--isolated" in command else WORKER
    modules = [part for part in command if part.startswith("dsec.")]
    if modules:
        return modules[0].removeprefix("dsec.").replace("_", "-")
    program = Path(command[0]).name
    # The postmaster alone: its backends name themselves "postgres: what they do".
    return program if program in SERVERS else None


@contextlib.asynccontextmanager
async def rig(
    *,
    config: str = "",
    sync_interval: str = "1s",
    timescaledb: bool = False,
    nats_nodes: int = 1,
    environment: Mapping[str, str] | None = None,
    replicas: Mapping[str, int] | None = None,
) -> AsyncIterator[Rig]:
    """A stack that runs until the block is left.

    Args:
        config: the text of its scheduler.config.yaml.
        nats_nodes: more than one make a cluster, and each keeps the stream.
        environment: settings of its services, added to this process's own.
        replicas: of services, by name; of those that it does not name, one.
    """
    counts = dict(replicas or {})
    os.environ.update({"DSEC_NATS_REPLICAS": str(nats_nodes)} | dict(environment or {}))
    with tempfile.TemporaryDirectory(prefix="dsec-loadtest-") as name:
        directory = Path(name)
        options = StackOptions(
            directory / "state",
            sync_interval=sync_interval,
            timescaledb=timescaledb,
            nats_nodes=nats_nodes,
            services=tuple(
                replace(one, replicas=counts.get(one.name, 1)) for one in service_commands()
            ),
        )
        (directory / "state").mkdir(mode=0o700)
        if config:
            (directory / "state" / "scheduler.config.yaml").write_text(config)
        async with Stack(options, on_progress=lambda _: None) as stack:
            endpoints = await start(stack, options.state_dir, None, lambda _: None)
            running = asyncio.current_task()
            assert running is not None
            # The stack takes signals over, and whoever sends one means the script.
            stopped = asyncio.create_task(stack.wait())
            stopped.add_done_callback(lambda task: task.cancelled() or running.cancel())
            engine = async_engine(endpoints.database_url)
            async with Client(
                nats_url=endpoints.nats_url,
                database_url=endpoints.database_url,
                object_store_url=endpoints.object_store_url,
            ) as client:
                yield Rig(directory, endpoints, client, engine)
            stopped.cancel()
            await engine.dispose()


def write_session(folder: Path, max_steps: int, files: Mapping[str, str], **keys: str) -> Path:
    """A session's files; returns the path of session.yaml. `keys` are of session.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    lines = {"agent": "agent_spec.yaml", "env": "env_spec.yaml", "reward": "env"} | keys
    lines |= {"seed": "1", "max_steps": str(max_steps)}
    session = folder / "session.yaml"
    session.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return session


def say(line: str) -> None:
    """Progress, apart from the result."""
    print(line, file=sys.stderr, flush=True)


def portions(total: int, parts: int) -> Iterator[int]:
    """A number in nearly equal parts."""
    for n in range(parts):
        yield total // parts + (1 if n < total % parts else 0)
