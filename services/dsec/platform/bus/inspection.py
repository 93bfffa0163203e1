"""What a NATS server and its stream say of themselves, asked once, for those who examine a machine.

A service connects for ever and waits; this connects once and says at once what is wrong.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client as NatsClient

from dsec.platform.bus.connection import nodes
from dsec.platform.bus.errors import BusUnavailable
from dsec_contracts import subjects

CONNECT_WAIT_S = 3.0
ALL_SERVERS_WAIT_S = 8.0
RECONNECT_WAIT_S = 0.1
ASK_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class ServerTime:
    """What the server's clock said between two readings of ours; all in seconds since 1970."""

    before_s: float
    there_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class BusFacts:
    """A server. `jetstream` says why there is none, and is empty where it is on. `stream` is the
    live configuration of our stream as the server gives it, None where it was not made yet."""

    version: str
    max_payload_bytes: int
    cluster_size: int
    jetstream: str
    stream: Mapping[str, Any] | None
    time: ServerTime | None


async def inspect_bus(url: str) -> BusFacts:
    """Ask a server what it is.

    Raises:
        BusUnavailable: it does not answer, or refuses the client.
    """
    reasons: list[Exception] = []

    async def on_error(error: Exception) -> None:
        reasons.append(error)

    try:
        async with asyncio.timeout(ALL_SERVERS_WAIT_S):
            nc = await nats.connect(
                nodes(url),
                name="dsec-doctor",
                error_cb=on_error,
                allow_reconnect=False,
                connect_timeout=CONNECT_WAIT_S,
                # The first connection is tried again under the settings for later ones.
                max_reconnect_attempts=1,
                reconnect_time_wait=RECONNECT_WAIT_S,
            )
    except (OSError, nats.errors.Error, TimeoutError, ValueError) as error:
        raise BusUnavailable(str((reasons or [error])[-1]) or type(error).__name__) from error
    try:
        return await _facts(nc)
    finally:
        await nc.close()


async def _facts(nc: NatsClient) -> BusFacts:
    jetstream, stream, read = "", None, None
    try:
        await nc.jetstream(timeout=ASK_WAIT_S).account_info()
    except nats.js.errors.APIError as error:
        jetstream = error.description or "it refuses"
    except (nats.errors.Error, TimeoutError) as error:
        jetstream = str(error) or type(error).__name__
    else:
        stream, read = await _stream(nc)
    return BusFacts(
        version=str(nc.connected_server_version),
        max_payload_bytes=nc.max_payload,
        cluster_size=1 + len(nc.discovered_servers),
        jetstream=jetstream,
        stream=stream,
        time=read,
    )


async def _stream(nc: NatsClient) -> tuple[Mapping[str, Any] | None, ServerTime | None]:
    """The stream's configuration, and the server's time as it was written into the answer."""
    before_s = time.time()
    reply = await nc.request(f"$JS.API.STREAM.INFO.{subjects.STREAM}", b"", timeout=ASK_WAIT_S)
    after_s = time.time()
    told = json.loads(reply.data)
    if "error" in told:
        return None, None
    there = told.get("ts")
    read = (
        ServerTime(before_s, datetime.fromisoformat(there).timestamp(), after_s) if there else None
    )
    return told["config"], read
