"""`python -m dsec.anchor_sync`: the composition root of one replica of anchor-sync."""

from __future__ import annotations

import logging
import sys

import uvloop

from dsec.anchor_sync.effects import proven
from dsec.anchor_sync.handlers import CONSUMER, Keeper
from dsec.anchor_sync.settings import AnchorSyncSettings
from dsec.platform.app import ServiceApp, stop_on_signals
from dsec.platform.bus import Bus, BusError
from dsec.platform.clock import utc_now
from dsec.platform.objects import ObjectStore, ObjectStoreError
from dsec.platform.settings import configure_logging
from dsec.platform.telemetry import connect, metrics
from dsec_contracts import AnchorCaptured, subjects

log = logging.getLogger("dsec.anchor_sync")

EXIT_AGAIN = 1
"""Something passed away that comes back: the supervisor should start us again."""
EXIT_SETTINGS = 2


async def serve(settings: AnchorSyncSettings) -> int:
    """Store anchors until SIGTERM or SIGINT. Returns the process's exit code."""
    stop = stop_on_signals()
    try:
        store = ObjectStore(settings.object_store_url)
    except ObjectStoreError as error:
        log.error("%s. Set DSEC_OBJECT_STORE_URL.", error)
        return EXIT_SETTINGS
    name = f"anchor-sync-{settings.anchor_replica}"
    bus = await Bus.connect(settings.nats_url, name)
    telemetry = connect(settings, "anchor-sync", settings.anchor_replica)
    keeper = Keeper(bus, store, settings, utc_now, telemetry)
    telemetry.counter(metrics.ANCHORS_STORED, lambda: keeper.stored)
    telemetry.counter(metrics.ANCHORS_LOST, lambda: keeper.lost)
    try:
        await bus.await_stream()
        captured = subjects.every(AnchorCaptured.event_name())
        # Before the store is proven: what waits for it must not be trimmed.
        await bus.consumer(CONSUMER, [captured], ack_wait_s=settings.anchor_ack_wait_s)
        if not await proven(settings.object_store_url, stop):
            return 0
        app = ServiceApp(
            bus,
            settings.nats_url,
            name,
            stop_s_max=settings.anchor_stop_s_max,
            ack_wait_s=settings.anchor_ack_wait_s,
        )
        await app.handle(CONSUMER, captured, keeper.on_anchor_captured)
        await app.run_beside(keeper.close, stop)
    except BusError as error:
        log.error("starting anew: %s", error)
        return EXIT_AGAIN
    finally:
        await bus.close()
        telemetry.close()
    return 0


def main() -> int:
    """Run the service."""
    settings = AnchorSyncSettings()
    configure_logging("anchor-sync", settings.log_level)
    return uvloop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
