"""Settings of the evaluator, all from `DSEC_*` variables."""

from __future__ import annotations

import os
import socket
from typing import Annotated

from pydantic import Field

from dsec.platform.settings import Settings


class EvaluatorSettings(Settings):
    """One replica."""

    evaluator_replica: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """How this replica is named in what it publishes."""
    evaluator_ack_wait_s: Annotated[float, Field(ge=1, le=300)] = 5.0
    """A killed replica's sessions are another's after this."""
    evaluator_floor_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """How long the log may take to come to a session's end before the end is looked at later."""
    evaluator_retry_s_min: Annotated[float, Field(gt=0)] = 0.5
    """The first wait before a session that could not be looked at is delivered again."""
    evaluator_retry_s_max: Annotated[float, Field(gt=0)] = 30.0
    """Waits double up to this."""
    evaluator_stop_s_max: Annotated[float, Field(gt=0)] = 25.0
    """How long a stop waits for the session at hand."""
