"""What a client is connected to: bus, log and object store, each when it is first needed.

They are servers of one's own, or those of the embedded stack that runs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsec.client.endpoints import ClientError, find_endpoints, stack_folder
from dsec.client.queries import Queries
from dsec.platform.bus import Bus
from dsec.platform.bus.retry import Retry
from dsec.platform.log import LogReader
from dsec.platform.objects import ObjectStore
from dsec.platform.stack.room import full_disk

DISK_LOOK_S = 2.0
"""How often it is looked at whether the disk of a stack that takes nothing is full."""


class Connections:
    """An async context manager that closes what was opened."""

    def __init__(
        self,
        *,
        nats_url: str | None,
        database_url: str | None,
        object_store_url: str | None,
        state_dir: Path | None,
        name: str,
    ) -> None:
        self._disk = None if nats_url and database_url else stack_folder(state_dir)
        if not (nats_url and database_url):
            found = find_endpoints(state_dir)
            nats_url = nats_url or found.nats_url
            database_url = database_url or found.database_url
            object_store_url = object_store_url or found.object_store_url
        self.nats_url = nats_url
        self.database_url = database_url
        self.object_store_url = object_store_url or ""
        self.name = name
        self.queries = Queries.connect(database_url)
        self._bus: Bus | None = None
        self._log: LogReader | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bus is not None:
            await self._bus.close()
        if self._log is not None:
            await self._log.close()
        await self.queries.close()

    async def bus(self, patience: Retry | None = None) -> Bus:
        """The bus, connected.

        Raises:
            BusUnavailable: not within `patience`; None: half a minute, which outlasts a restart.
        """
        async with self._connecting:
            if self._bus is None:
                self._bus = await Bus.connect(self.nats_url, self.name, patience)
            return self._bus

    async def log(self) -> LogReader:
        """The log, connected."""
        async with self._connecting:
            if self._log is None:
                self._log = await LogReader.connect(self.database_url)
            return self._log

    def objects(self) -> ObjectStore:
        """The object store.

        Raises:
            ClientError: none is configured.
        """
        if not self.object_store_url:
            raise ClientError("no object store is configured: set DSEC_OBJECT_STORE_URL")
        return ObjectStore(self.object_store_url)

    async def _taken(self, publishing: Coroutine[Any, Any, None]) -> None:
        """Publish. A bus that is away is waited for, but not one whose disk is full: it says
        nothing, and does not come back by itself."""
        task = asyncio.create_task(publishing)
        try:
            while not (await asyncio.wait({task}, timeout=DISK_LOOK_S))[0]:
                if self._disk is not None and (sentence := full_disk(self._disk)) is not None:
                    raise ClientError(sentence)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        task.result()
