"""`python -m dsec.anchor_sync`: the composition root of one replica of anchor-sync."""

from __future__ import annotations

import logging
import sys

from dsec.anchor_sync.effects import proven
from dsec.anchor_sync.handlers import CONSUMER, Keeper
from dsec.anchor_sync.settings import AnchorSyncSettings
from dsec.platform.app import ServiceApp
from dsec.platform.clock import utc_now
from dsec.platform.objects import ObjectStore, ObjectStoreError
from dsec.platform.service import Replica, run, serve
from dsec.platform.telemetry import metrics
from dsec_contracts import AnchorCaptured, subjects

log = logging.getLogger("dsec.anchor_sync")

EXIT_SETTINGS = 2


async def keep(settings: AnchorSyncSettings) -> int:
    """Store anchors until SIGTERM or SIGINT. Returns the process's exit code."""
    try:
        store = ObjectStore(settings.object_store_url)
    except ObjectStoreError as error:
        log.error("%s. Set DSEC_OBJECT_STORE_URL.", error)
        return EXIT_SETTINGS

    async def work(replica: Replica) -> None:
        bus, telemetry = replica.bus, replica.telemetry
        keeper = Keeper(bus, store, settings, utc_now, telemetry)
        telemetry.counter(metrics.ANCHORS_STORED, lambda: keeper.stored)
        telemetry.counter(metrics.ANCHORS_LOST, lambda: keeper.lost)
        captured = subjects.every(AnchorCaptured.event_name())
        # Before the store is proven: what waits for it must not be trimmed.
        await bus.consumer(CONSUMER, [captured], ack_wait_s=settings.anchor_ack_wait_s)
        if not await proven(settings.object_store_url, replica.stop):
            return
        app = ServiceApp(
            bus,
            settings.nats_url,
            replica.name,
            stop_s_max=settings.anchor_stop_s_max,
            ack_wait_s=settings.anchor_ack_wait_s,
        )
        await app.handle(CONSUMER, captured, keeper.on_anchor_captured)
        await app.run_beside(keeper.close, replica.stop)

    return await serve(settings, "anchor-sync", settings.anchor_replica, work)


def main() -> int:
    """Run the service."""
    settings = AnchorSyncSettings()
    return run("anchor-sync", settings, keep(settings))


if __name__ == "__main__":
    sys.exit(main())
