"""What a process does not need it does not load: a stack starts nine of them, and each import that
is not needed is paid nine times, by users and by this suite."""

from __future__ import annotations

import subprocess
import sys

import pytest

SESSIONS = ("numpy", "gymnasium")
UNNEEDED = {
    "dsec.scheduler.__main__": ("aiohttp", *SESSIONS),
    "dsec.env_runtime.__main__": ("nats", "asyncpg", "aiohttp", "sqlalchemy", *SESSIONS),
    "dsec.env_runtime.supervisor": ("asyncpg", "aiohttp", "sqlalchemy", *SESSIONS),
    "dsec.env_runtime.worker": ("aiohttp", "sqlalchemy"),
    "dsec.reward.__main__": ("sqlalchemy",),
    "dsec.tool.__main__": ("aiohttp", "sqlalchemy", "httpx", "jsonschema", "mcp", *SESSIONS),
    "dsec.tool.calling_process": ("nats", "asyncpg", "aiohttp", "httpx", "mcp", *SESSIONS),
    "dsec.anchor_sync.__main__": ("aiohttp", "asyncpg", "sqlalchemy", "boto3", *SESSIONS),
    "dsec.recorder.__main__": ("aiohttp", "asyncpg"),
    "dsec.evaluator.__main__": ("aiohttp", "sqlalchemy", *SESSIONS),
}
"""Process to what it must not have loaded when it begins to work. `torch` is nowhere, and no source
is read for what schemas say."""


@pytest.mark.parametrize("module", list(UNNEEDED))
def test_a_process_loads_what_it_needs(module: str) -> None:
    unneeded = ("torch", "dsec_contracts.docstrings", *UNNEEDED[module])
    program = f"import sys, {module}; print([m for m in {unneeded!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_the_bus_speaks_to_websockets_all_the_same() -> None:
    """What nats-py would have loaded is there when it is asked for, and for others as ever."""
    program = (
        "import dsec.platform.bus, nats.aio.transport as transport, sys\n"
        "assert 'aiohttp' not in sys.modules\n"
        "found = transport.aiohttp.WSMsgType\n"
        "import aiohttp, aiohttp.web\n"
        "assert found is aiohttp.WSMsgType"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
