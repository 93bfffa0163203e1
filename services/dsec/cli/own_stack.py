"""The stack that `demo` and `validate-determinism` use: the one that runs, or one of their own.

Their own lies in a temporary directory and leaves nothing behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from dsec.cli import services
from dsec.client.client import Client
from dsec.client.endpoints import ClientError, find_endpoints
from dsec.platform.stack import Endpoints, Stack, StackOptions


@asynccontextmanager
async def some_client(say: Callable[[str], None]) -> AsyncIterator[tuple[Client, bool]]:
    """A client, and whether its stack is only ours and goes away with it."""
    try:
        found = find_endpoints()
    except ClientError:
        async with _own_stack(say) as client:
            yield client, True
        return
    async with _client(found) as client:
        yield client, False


@asynccontextmanager
async def _own_stack(say: Callable[[str], None]) -> AsyncIterator[Client]:
    say("No stack is running: starting one in a temporary directory …")
    with tempfile.TemporaryDirectory(prefix="dsec-", ignore_cleanup_errors=True) as folder:
        # The embedded database may run as another user, who has to pass through.
        Path(folder).chmod(0o711)
        options = StackOptions(
            state_dir=Path(folder) / "state", services=services.service_commands()
        )
        async with Stack(options, on_progress=say) as stack:
            endpoints = await services.start(stack, options.state_dir, None, say)
            async with _client(endpoints) as client:
                yield client


def _client(endpoints: Endpoints) -> Client:
    return Client(
        nats_url=endpoints.nats_url,
        database_url=endpoints.database_url,
        object_store_url=endpoints.object_store_url,
        name="cli",
    )
