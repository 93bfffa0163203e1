"""Whom the embedded PostgreSQL, which refuses to be root, would run as here.

The stack starts programs from its main thread alone, and a check is not on it: so the question is
asked by a process of its own, which this module is when it is run as a program.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dsec.doctor.finding import Finding
from dsec.platform.stack.errors import StackError
from dsec.platform.stack.unprivileged import Unprivileged

ASK_WAIT_S = 12.0


def namespaces(database_is_given: bool) -> Finding:
    """How PostgreSQL would be started, where it is ours to start."""
    ran = subprocess.run(
        [sys.executable, "-m", __name__],
        capture_output=True,
        text=True,
        timeout=ASK_WAIT_S,
        check=True,
    )
    return judge(json.loads(ran.stdout), database_is_given)


def judge(way: dict[str, Any], database_is_given: bool) -> Finding:
    """What the way that was found means."""
    if way["error"]:
        return Finding(
            "absent" if database_is_given else "fail",
            f"The embedded PostgreSQL cannot be started here. {way['error']}",
            "" if database_is_given else "Set DSEC_DATABASE_URL to a PostgreSQL of your own.",
        )
    if way["namespace"]:
        return Finding("ok", "PostgreSQL runs in a user namespace of its own.", "", way)
    if way["user_id"] is None:
        return Finding("ok", "PostgreSQL runs as this user and needs no user namespace.", "", way)
    return Finding(
        "warn",
        f"User namespaces are forbidden, so PostgreSQL runs as the user {way['user_id']}.",
        "Start the stack as an ordinary user, or keep its folders open to that one (chmod o+x).",
        way,
    )


def find_way() -> dict[str, Any]:
    """The way that this machine allows, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="dsec-doctor-") as folder:
        try:
            way = asyncio.run(Unprivileged.choose(Path(folder) / "unshare.log"))
        except StackError as error:
            return {"namespace": False, "user_id": None, "error": str(error)}
    return {"namespace": bool(way.prefix), "user_id": way.user_id, "error": ""}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(find_way()))
