"""The embedded servers' programs: that they are there, run on this machine, and are new enough."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from dsec.doctor.finding import Finding
from dsec.platform.stack.errors import StackError
from dsec.platform.stack.nats_server import nats_server_binary
from dsec.platform.stack.postgres import POSTGRES, postgres_binary

VERSION_WAIT_S = 10.0
NATS_MIN = (2, 11)
POSTGRES_MIN = (15,)
POSTGRES_KNOWN_MAX = 18


def nats_binary() -> Finding:
    """The embedded nats-server."""
    try:
        path = nats_server_binary()
    except StackError as error:
        return Finding("fail", str(error), "Or set DSEC_NATS_URL to a server of your own.")
    return _finding("nats-server", path, NATS_MIN)


def postgres_program() -> Finding:
    """The embedded PostgreSQL."""
    try:
        path = postgres_binary(POSTGRES)
    except StackError as error:
        return Finding("fail", str(error), "Or set DSEC_DATABASE_URL to a server of your own.")
    return _finding("PostgreSQL", path, POSTGRES_MIN)


def _finding(name: str, path: Path, least: tuple[int, ...]) -> Finding:
    try:
        ran = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_WAIT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            "fail",
            f"The embedded {name} does not run here ({error}).",
            "Install its package again, or give the URL of a server of your own.",
            {"path": str(path)},
        )
    version = version_in(ran.stdout)
    facts = {"path": str(path), "version": ".".join(map(str, version))}
    if version < least:
        return Finding(
            "fail",
            f"The embedded {name} is {facts['version']}, too old.",
            f"Install the pinned package: {'.'.join(map(str, least))} is needed at the least.",
            facts,
        )
    return Finding("ok", f"The embedded {name} is {facts['version']}.", "", facts)


def version_in(text: str) -> tuple[int, ...]:
    """The first version number in a text; empty where there is none."""
    found = re.search(r"\d+(?:\.\d+)+", text) or re.search(r"\d+", text)
    return tuple(map(int, found[0].split("."))) if found else ()
