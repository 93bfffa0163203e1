"""`python -m dsec.tool`: the composition root of one replica of the tool service."""

from __future__ import annotations

import logging
import os
import sys

import uvloop

from dsec.platform.app import ServiceApp, stop_on_signals
from dsec.platform.bus import Bus, BusError
from dsec.platform.clock import utc_now
from dsec.platform.log import LogReader
from dsec.platform.objects import ObjectStore
from dsec.platform.settings import configure_logging
from dsec.platform.specs import Patience, spec_source
from dsec.platform.telemetry import Telemetry, connect
from dsec.tool.effects import Tools, memory_of
from dsec.tool.handlers import CONSUMER, Caller
from dsec.tool.processes import Processes
from dsec.tool.settings import ToolSettings
from dsec_contracts import SessionEnded, ToolCalled, subjects

log = logging.getLogger("dsec.tool")

EXIT_AGAIN = 1
"""Something passed away that comes back: the supervisor should start us again."""


async def serve(settings: ToolSettings) -> int:
    """Make calls until SIGTERM or SIGINT. Returns the process's exit code."""
    stop = stop_on_signals()
    name = f"tool-{settings.tool_replica}"
    url = settings.object_store_url
    reader = await LogReader.connect(settings.database_url)
    bus = await Bus.connect(settings.nats_url, name)
    limits = settings.user_limits(settings.tool_memory_bytes_max)
    processes = Processes(limits, settings.tool_idle_processes_max)
    telemetry = connect(settings, "tool", settings.tool_replica)
    try:
        await bus.await_stream()
        objects = ObjectStore(url) if url else None
        caller = _caller(settings, bus, reader, objects, processes, telemetry)
        app = ServiceApp(
            bus,
            settings.nats_url,
            name,
            stop_s_max=settings.tool_stop_s_max,
            ack_wait_s=settings.tool_ack_wait_s,
        )
        await app.handle(CONSUMER, subjects.every(ToolCalled.event_name()), caller.on_tool_called)
        await bus.listen(subjects.every(SessionEnded.event_name()), caller.on_session_ended)
        await app.run_beside(caller.close, stop)
    except BusError as error:
        log.error("starting anew: %s", error)
        return EXIT_AGAIN
    finally:
        await processes.close()
        await bus.close()
        await reader.close()
        telemetry.close()
    return 0


def _caller(
    settings: ToolSettings,
    bus: Bus,
    reader: LogReader,
    objects: ObjectStore | None,
    processes: Processes,
    telemetry: Telemetry,
) -> Caller:
    async def last_said() -> int:
        return await bus.last_sequence(subjects.TOOL)

    tools = Tools(
        spec_source(reader, objects, "tool", settings.tool_log_wait_s),
        os.environ,
        patience=Patience(settings.tool_absent_s_max),
        kept_max=settings.tool_specs_max,
    )
    past = memory_of(reader, last_said, settings.tool_log_wait_s)
    return Caller(bus, tools, past, processes, settings, utc_now, objects, telemetry)


def main() -> int:
    """Run the service."""
    settings = ToolSettings()
    configure_logging("tool", settings.log_level)
    return uvloop.run(serve(settings))


if __name__ == "__main__":
    sys.exit(main())
