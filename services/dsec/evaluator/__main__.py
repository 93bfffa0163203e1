"""`python -m dsec.evaluator`: the composition root of one replica of the evaluator."""

from __future__ import annotations

import logging
import sys

import uvloop

from dsec.evaluator.handlers import CONSUMER, Evaluator
from dsec.evaluator.settings import EvaluatorSettings
from dsec.platform.app import ServiceApp, stop_on_signals
from dsec.platform.bus import Bus, BusError
from dsec.platform.clock import utc_now
from dsec.platform.log import LogReader
from dsec.platform.settings import configure_logging
from dsec.platform.telemetry import connect
from dsec_contracts import SessionEnded, subjects

log = logging.getLogger("dsec.evaluator")

EXIT_AGAIN = 1
"""Something passed away that comes back: the supervisor should start us again."""


async def serve(settings: EvaluatorSettings) -> int:
    """Audit sessions until SIGTERM or SIGINT. Returns the process's exit code."""
    stop = stop_on_signals()
    name = f"evaluator-{settings.evaluator_replica}"
    log_reader = await LogReader.connect(settings.database_url)
    bus = await Bus.connect(settings.nats_url, name)
    telemetry = connect(settings, "evaluator", settings.evaluator_replica)
    evaluator = Evaluator(bus, log_reader, settings, utc_now, telemetry)
    try:
        await bus.await_stream()
        app = ServiceApp(
            bus,
            settings.nats_url,
            name,
            stop_s_max=settings.evaluator_stop_s_max,
            ack_wait_s=settings.evaluator_ack_wait_s,
        )
        ended = subjects.every(SessionEnded.event_name())
        await app.handle(CONSUMER, ended, evaluator.on_session_ended)
        await app.run(stop)
    except BusError as error:
        log.error("starting anew: %s", error)
        return EXIT_AGAIN
    finally:
        await bus.close()
        await log_reader.close()
        telemetry.close()
    return 0


def main() -> int:
    """Run the service."""
    settings = EvaluatorSettings()
    configure_logging("evaluator", settings.log_level)
    return uvloop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
