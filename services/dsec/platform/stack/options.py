"""What a stack is asked to run: its servers, by URL or embedded, and its services."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServiceCommand:
    """A service to run: its name, its command line, and how many of it.

    `stop_turn`: those with a lower one have stopped before; those with the same stop together.
    """

    name: str
    argv: tuple[str, ...]
    replicas: int = 1
    stop_turn: int = 0


@dataclass(frozen=True)
class StackOptions:
    """What to run. A URL that is given means a server that is not ours to start or stop.

    `timescaledb`: with TimescaleDB, from the distribution's packages; a state directory whose
    database was made with it keeps it. `nats_nodes`: of a NATS cluster; all on this machine, so
    several serve to try one out.
    """

    state_dir: Path
    nats_url: str | None = None
    database_url: str | None = None
    object_store_url: str | None = None
    nats_port: int | None = None
    nats_nodes: int = 1
    postgres_port: int | None = None
    sync_interval: str = "1s"
    timescaledb: bool = False
    services: tuple[ServiceCommand, ...] = ()
