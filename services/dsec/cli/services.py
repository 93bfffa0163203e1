"""What an embedded stack runs, and the steps between its servers and its services."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from dsec.platform.bus import Bus, StreamOptions
from dsec.platform.migrations import migrate
from dsec.platform.roles import OPERATOR
from dsec.platform.settings import Settings
from dsec.platform.stack import Endpoints, ServiceCommand, Stack
from dsec.platform.stack.database_roles import OWNER
from dsec.scheduler.settings import CONFIG_VARIABLE

SERVICES = ("recorder", "scheduler", "reward", "tool", "anchor_sync", "evaluator", "env_runtime")
STOP_TURNS = {"env_runtime": 0, "recorder": 2}
"""Workers hand their sessions back, and their anchors are stored, while all others are there; the
recorder stops when nobody else has anything to say. Those between stop together."""
CONFIG_FILE = "scheduler.config.yaml"


def service_commands() -> tuple[ServiceCommand, ...]:
    """One process of each service."""
    return tuple(
        ServiceCommand(
            name.replace("_", "-"),
            (sys.executable, "-m", f"dsec.{name}"),
            stop_turn=STOP_TURNS.get(name, 1),
        )
        for name in SERVICES
    )


def scheduler_config_path(state_dir: Path) -> Path | None:
    """The scheduler's file: named by the environment, or lying in the state directory."""
    if named := os.environ.get(CONFIG_VARIABLE):
        return Path(named)
    path = state_dir / CONFIG_FILE
    return path if path.is_file() else None


async def start(
    stack: Stack, state_dir: Path, workers: int | None, say: Callable[[str], None]
) -> Endpoints:
    """Servers, then the schema and the stream, then the services."""
    endpoints = await stack.start_servers()
    await asyncio.to_thread(migrate, stack.database_url_of(OWNER))
    # Made here and not by the first service: a request may come as soon as this returns.
    bus = await Bus.connect(stack.nats_url_of(OPERATOR), "up")
    try:
        await bus.ensure_stream(StreamOptions(replicas=Settings().nats_replicas))
    finally:
        await bus.close()
    env: dict[str, str] = {}
    if workers is not None:
        env["DSEC_WORKERS"] = str(workers)
    if (config := scheduler_config_path(state_dir)) is not None:
        env[CONFIG_VARIABLE] = str(config)
    await stack.start_services(env)
    say(f"Started {', '.join(SERVICES)}.")
    return endpoints
