"""Composition root: connect, lead or stand by, schedule, and hand over on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time

import uvloop

from dsec.platform.bus import Bus, BusError
from dsec.platform.clock import utc_now
from dsec.platform.service import EXIT_AGAIN, stop_on_signals
from dsec.platform.settings import Settings, configure_logging
from dsec.platform.telemetry import Telemetry, connect
from dsec.scheduler.handlers import STOP_WAIT_S_MAX, DeliveryLost, Scheduler
from dsec.scheduler.history import History
from dsec.scheduler.leadership import LEASE_NAME, LEASE_TTL_S, Leadership, LeadershipLost
from dsec.scheduler.recovery import LOG_AWAY
from dsec.scheduler.settings import ConfigError, SchedulerConfig, load_config

log = logging.getLogger("dsec.scheduler")

EXIT_CONFIG = 78
"""The configuration is at fault: starting again changes nothing (EX_CONFIG of sysexits.h)."""


async def serve(settings: Settings, config: SchedulerConfig, stop: asyncio.Event) -> None:
    """Wait for the lease, then schedule until told to stop.

    Raises:
        LeadershipLost, DeliveryLost, BusError: start anew.
    """
    holder = f"{socket.gethostname()}-{os.getpid()}"
    bus = await Bus.connect(settings.nats_url, f"scheduler-{holder}")
    history = History.connect(settings.database_url)
    telemetry = connect(settings, "scheduler", holder)
    try:
        lease = await bus.lease(LEASE_NAME, holder, LEASE_TTL_S)
        leadership = Leadership(lease, time.monotonic)
        try:
            if await leadership.take(stop):
                await lead(bus, history, config, leadership, telemetry, stop)
        finally:
            await leadership.release()
    finally:
        await history.close()
        await bus.close()
        telemetry.close()


async def lead(
    bus: Bus,
    history: History,
    config: SchedulerConfig,
    leadership: Leadership,
    telemetry: Telemetry,
    stop: asyncio.Event,
) -> None:
    """Schedule for as long as the lease is ours."""
    scheduler = Scheduler(
        bus,
        history,
        config,
        leadership,
        now=utc_now,
        monotonic=time.monotonic,
        telemetry=telemetry,
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(leadership.keep(stop))
        running = group.create_task(scheduler.run(stop))
        await stop.wait()
        await asyncio.wait([running], timeout=2 * STOP_WAIT_S_MAX)
        running.cancel()  # it may still wait for the log


async def _until_signalled(settings: Settings, config: SchedulerConfig) -> int:
    stop = stop_on_signals()
    result = 0
    try:
        await serve(settings, config, stop)
    except* (LeadershipLost, DeliveryLost, BusError, *LOG_AWAY) as errors:
        for error in _single(errors):
            log.error("stepping down: %s", error)
        result = EXIT_AGAIN
    return result


def _single(error: BaseException) -> list[BaseException]:
    """The errors of a group, and of the groups in it."""
    if isinstance(error, BaseExceptionGroup):
        return [one for part in error.exceptions for one in _single(part)]
    return [error]


def main() -> int:
    """Run until SIGTERM or SIGINT."""
    settings = Settings()
    configure_logging("scheduler", settings.log_level)
    try:
        config = load_config()
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    return uvloop.run(_until_signalled(settings, config))


if __name__ == "__main__":
    sys.exit(main())
