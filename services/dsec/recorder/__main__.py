"""`python -m dsec.recorder`: the composition root of the recorder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

import uvloop
from sqlalchemy.exc import OperationalError
from tenacity import (
    AsyncRetrying,
    before_sleep_log,
    retry_if_exception_type,
    wait_random_exponential,
)

from dsec.platform.bus import Bus
from dsec.platform.clock import utc_now
from dsec.platform.db import DatabaseError
from dsec.platform.migrations import migrate
from dsec.platform.service import stop_on_signals
from dsec.platform.settings import configure_logging
from dsec.platform.storage import log_storage
from dsec.platform.telemetry import connect
from dsec.recorder.leadership import Recorder
from dsec.recorder.settings import RecorderSettings

log = logging.getLogger("dsec.recorder")


async def serve() -> None:
    """Migrate, and record until SIGTERM or SIGINT."""
    settings = RecorderSettings()
    configure_logging("recorder", settings.log_level)
    stop = stop_on_signals()
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(OperationalError),
        wait=wait_random_exponential(multiplier=0.1, max=settings.retry_wait_s_max),
        before_sleep=before_sleep_log(log, logging.WARNING),
        stop=lambda _: stop.is_set(),
        retry_error_callback=lambda _: None,  # stopped while it waited: nothing to report
    )
    await retrying(asyncio.to_thread, migrate, settings.database_url)
    await asyncio.to_thread(_say_storage, settings.database_url)
    bus = await Bus.connect(settings.nats_url, "recorder")
    telemetry = connect(settings, "recorder", f"{socket.gethostname()}-{os.getpid()}")
    try:
        await Recorder(bus, settings, utc_now, telemetry=telemetry).run(stop)
    finally:
        await bus.close()
        telemetry.close()


def _say_storage(database_url: str) -> None:
    with contextlib.suppress(DatabaseError):  # gone again: recording says so, and waits
        if storage := log_storage(database_url):
            log.info("%s", storage.sentence())


def main() -> None:
    """Run the service."""
    uvloop.run(serve())


if __name__ == "__main__":
    main()
