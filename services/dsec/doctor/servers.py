"""The servers that are given or that run here: each is asked once, whoever needs the answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dsec.doctor.finding import Unseen
from dsec.doctor.hiding import shown
from dsec.platform.bus.inspection import BusFacts, inspect_bus
from dsec.platform.database_facts import DatabaseFacts, database_facts
from dsec.platform.settings import Settings
from dsec.platform.stack.state import Endpoints
from dsec.platform.stack.status import stack_status

T = TypeVar("T")
URL_VARIABLES = {
    "nats_url": "DSEC_NATS_URL",
    "database_url": "DSEC_DATABASE_URL",
    "object_store_url": "DSEC_OBJECT_STORE_URL",
}
MONITOR_VARIABLE = "DSEC_NATS_MONITOR_URL"


@dataclass(frozen=True, slots=True)
class Servers:
    """URLs of what is to be examined; None for what is neither given nor running."""

    nats_url: str | None
    database_url: str | None
    object_store_url: str | None
    nats_monitor_url: str | None
    state_dir: Path
    nats_is_embedded: bool

    def urls(self) -> list[str]:
        """All that are known."""
        known = (
            self.nats_url,
            self.database_url,
            self.object_store_url,
            self.nats_monitor_url,
        )
        return [url for url in known if url]


def find_servers(
    state_dir: Path, environment: Mapping[str, str], monitor_url: str | None
) -> Servers:
    """What the environment gives, and for the rest the embedded stack if it runs."""
    settings = Settings()
    given = {
        name: getattr(settings, name) or None
        for name, variable in URL_VARIABLES.items()
        if environment.get(variable)
    }
    found = stack_status(state_dir)
    running = found.endpoints if found.state != "stopped" else None
    embedded = running is not None and "nats_url" not in given
    return Servers(
        nats_url=_first(given, running, "nats_url"),
        database_url=_first(given, running, "database_url"),
        object_store_url=_first(given, running, "object_store_url"),
        nats_monitor_url=monitor_url,
        state_dir=state_dir,
        nats_is_embedded=embedded,
    )


def _first(given: Mapping[str, str | None], running: Endpoints | None, name: str) -> str | None:
    url = given.get(name) or (getattr(running, name) if running is not None else None)
    return url or None


class Once(Generic[T]):
    """An answer that several checks want, asked for by the first of them."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answer: list[T] = []
        self._error: Exception | None = None

    def __call__(self) -> T:
        """The answer.

        Raises:
            Exception: what asking raised, every time.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._answer:
                try:
                    self._answer.append(self._ask())
                except Exception as error:
                    self._error = error
                    raise
            return self._answer[0]


@dataclass(frozen=True, slots=True)
class Asked:
    """The answers of the servers, each asked for at most once."""

    servers: Servers
    bus: Once[BusFacts]
    database: Once[DatabaseFacts]

    @classmethod
    def of(cls, servers: Servers) -> Asked:
        """Nobody is asked yet."""
        return cls(
            servers,
            Once(lambda: asyncio.run(inspect_bus(servers.nats_url or ""))),
            Once(lambda: database_facts(servers.database_url or "")),
        )

    def seen_bus(self) -> BusFacts:
        """The bus, for checks beside the one that says whether it is there.

        Raises:
            Unseen: there is none, or it does not answer.
        """
        if self.servers.nats_url is None:
            raise Unseen("No NATS server is given, and no stack runs here.")
        try:
            return self.bus()
        except Exception as error:
            raise Unseen(
                f"Not examined: {shown(self.servers.nats_url)} cannot be asked."
            ) from error

    def seen_database(self) -> DatabaseFacts:
        """The database, likewise.

        Raises:
            Unseen: there is none, or it does not answer.
        """
        if self.servers.database_url is None:
            raise Unseen("No PostgreSQL is given, and no stack runs here.")
        try:
            return self.database()
        except Exception as error:
            raise Unseen(
                f"Not examined: {shown(self.servers.database_url)} cannot be asked."
            ) from error
