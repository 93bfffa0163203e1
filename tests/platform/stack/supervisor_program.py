"""A supervisor as a program of its own, for tests that kill it: `STATE_DIR [service argv…]`.

Prints one line of JSON when everything is up, and one for each word of progress.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from dsec.platform.stack import ServiceCommand, Stack, StackError, StackOptions


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def supervise(state_dir: Path, service_argv: tuple[str, ...]) -> None:
    services = (ServiceCommand("service", service_argv),) if service_argv else ()
    options = StackOptions(state_dir=state_dir, services=services)
    async with Stack(options, on_progress=lambda text: say(progress=text)) as stack:
        endpoints = await stack.start_servers()
        await stack.start_services({})
        say(ready=dataclasses.asdict(endpoints))
        await stack.wait()


try:
    asyncio.run(supervise(Path(sys.argv[1]), tuple(sys.argv[2:])))
except StackError as error:
    say(error=str(error))
    sys.exit(1)
