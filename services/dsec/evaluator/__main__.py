"""`python -m dsec.evaluator`: the composition root of one replica of the evaluator."""

from __future__ import annotations

import sys

from dsec.evaluator.handlers import CONSUMER, Evaluator
from dsec.evaluator.settings import EvaluatorSettings
from dsec.platform.app import ServiceApp
from dsec.platform.clock import utc_now
from dsec.platform.log import LogReader
from dsec.platform.service import Replica, run, serve
from dsec_contracts import SessionEnded, subjects


async def audit(settings: EvaluatorSettings) -> int:
    """Audit sessions until SIGTERM or SIGINT. Returns the process's exit code."""
    log_reader = await LogReader.connect(settings.database_url)

    async def work(replica: Replica) -> None:
        evaluator = Evaluator(replica.bus, log_reader, settings, utc_now, replica.telemetry)
        app = ServiceApp(
            replica.bus,
            settings.nats_url,
            replica.name,
            stop_s_max=settings.evaluator_stop_s_max,
            ack_wait_s=settings.evaluator_ack_wait_s,
        )
        ended = subjects.every(SessionEnded.event_name())
        await app.handle(CONSUMER, ended, evaluator.on_session_ended)
        await app.run(replica.stop)

    try:
        return await serve(settings, "evaluator", settings.evaluator_replica, work)
    finally:
        await log_reader.close()


def main() -> int:
    """Run the service."""
    settings = EvaluatorSettings()
    return run("evaluator", settings, audit(settings))


if __name__ == "__main__":
    sys.exit(main())
