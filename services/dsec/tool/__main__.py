"""`python -m dsec.tool`: the composition root of one replica of the tool service."""

from __future__ import annotations

import os
import sys

from dsec.platform.app import ServiceApp
from dsec.platform.bus import Bus
from dsec.platform.clock import utc_now
from dsec.platform.log import LogReader
from dsec.platform.objects import ObjectStore
from dsec.platform.service import Replica, run, serve
from dsec.platform.specs import Patience, spec_source
from dsec.platform.telemetry import Telemetry
from dsec.tool.effects import Tools, memory_of
from dsec.tool.handlers import CONSUMER, Caller
from dsec.tool.processes import Processes
from dsec.tool.settings import ToolSettings
from dsec_contracts import SessionEnded, ToolCalled, subjects


async def call(settings: ToolSettings) -> int:
    """Make calls until SIGTERM or SIGINT. Returns the process's exit code."""
    url = settings.object_store_url
    reader = await LogReader.connect(settings.database_url)
    limits = settings.user_limits(settings.tool_memory_bytes_max)
    processes = Processes(limits, settings.tool_idle_processes_max)

    async def work(replica: Replica) -> None:
        bus = replica.bus
        objects = ObjectStore(url) if url else None
        caller = _caller(settings, bus, reader, objects, processes, replica.telemetry)
        app = ServiceApp(
            bus,
            settings.nats_url,
            replica.name,
            stop_s_max=settings.tool_stop_s_max,
            ack_wait_s=settings.tool_ack_wait_s,
        )
        try:
            await app.handle(
                CONSUMER, subjects.every(ToolCalled.event_name()), caller.on_tool_called
            )
            await bus.listen(subjects.every(SessionEnded.event_name()), caller.on_session_ended)
            await app.run_beside(caller.close, replica.stop)
        finally:
            await processes.close()

    try:
        return await serve(settings, "tool", settings.tool_replica, work)
    finally:
        await reader.close()


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
    return run("tool", settings, call(settings))


if __name__ == "__main__":
    sys.exit(main())
