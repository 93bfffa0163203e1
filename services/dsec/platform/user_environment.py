"""The environment of a process that runs user code: nothing in it opens anything.

Where the servers are is not user code's business, and what it prints or sends must not contain a
password that happened to be exported where the stack was started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(
    r"^(DSEC_|PG[A-Z]|SSH_|OTEL_EXPORTER_)|SECRET|PASSWORD|PASSWD|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY"
    r"|(^|_)TOKENS?(_|$)",  # but not TOKENIZERS_PARALLELISM
    re.IGNORECASE,
)
_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@")
"""A URL with a password, whatever the variable is called."""

_SETTLED = {
    # What results may depend on and nobody means: one thread, one hash seed, one time zone.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What user code may see of `environment`."""
    return {
        name: value
        for name, value in environment.items()
        if not _NAME.search(name) and not _VALUE.search(value)
    }


def of_sessions(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that executes sessions or scores them, live or again: it settles
    what could otherwise give other results there than here."""
    return {**without_secrets(environment), **_SETTLED}
