"""A service's process: from its connections to the exit code that its supervisor goes by.

Each service's `__main__` is only its composition: what it is made of, and what it follows.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop

from dsec.platform.bus import Bus, BusError
from dsec.platform.settings import Settings, configure_logging
from dsec.platform.telemetry import Telemetry, connect

log = logging.getLogger(__name__)

EXIT_AGAIN = 1
"""Something passed away that comes back: the supervisor should start us again."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What one replica of a service has, until it is over."""

    name: str
    """As the bus knows it."""
    bus: Bus
    telemetry: Telemetry
    stop: asyncio.Event
    """Set by SIGTERM and SIGINT."""


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def serve(
    settings: Settings, service: str, replica: str, work: Callable[[Replica], Awaitable[None]]
) -> int:
    """Have a replica work until SIGTERM or SIGINT, once there is a stream.

    Args:
        work: returns when told to stop, and closes what it opened.

    Returns:
        The exit code of the process: `EXIT_AGAIN` where the bus would have it no longer.
    """
    stop = stop_on_signals()
    name = f"{service}-{replica}"
    bus = await Bus.connect(settings.nats_url, name)
    telemetry = connect(settings, service, replica)
    try:
        await bus.await_stream()
        await work(Replica(name, bus, telemetry, stop))
    except BusError as error:
        log.error("starting anew: %s", error)
        return EXIT_AGAIN
    finally:
        await bus.close()
        telemetry.close()
    return 0


def run(service: str, settings: Settings, serving: Coroutine[Any, Any, int]) -> int:
    """Run a service on an event loop. Returns its exit code."""
    configure_logging(service, settings.log_level)
    return uvloop.run(serving)
