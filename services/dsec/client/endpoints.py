"""Where the bus, the log and the object store are, without anybody having to say so.

Explicit URLs win, then `DSEC_*` variables, then the embedded stack that runs on this machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from dsec.platform.settings import Settings
from dsec.platform.stack.state import Endpoints, default_state_dir
from dsec.platform.stack.status import stack_status

_VARIABLES = ("DSEC_NATS_URL", "DSEC_DATABASE_URL")


class ClientError(Exception):
    """Something that was asked for cannot be done; one sentence says what to do instead."""


def stack_folder(state_dir: Path | None) -> Path | None:
    """The state directory of the embedded stack to use; None: variables name other servers."""
    if state_dir is None and any(os.environ.get(name) for name in _VARIABLES):
        return None
    return state_dir or default_state_dir()


def find_endpoints(state_dir: Path | None = None) -> Endpoints:
    """The servers to talk to.

    Args:
        state_dir: of an embedded stack; the default one where None.

    Raises:
        ClientError: no variable is set and no stack runs.
    """
    folder = stack_folder(state_dir)
    if folder is None:
        settings = Settings()
        return Endpoints(settings.nats_url, settings.database_url, settings.object_store_url)
    status = stack_status(folder)
    if status.state == "stopped" or status.endpoints is None:
        raise ClientError(
            f"no stack is running on {folder}: start one with `dsec up --detach`, or set "
            f"{' and '.join(_VARIABLES)} to servers of your own"
        )
    return status.endpoints
