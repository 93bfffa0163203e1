"""Settings of the tool service, all from `DSEC_*` variables."""

from __future__ import annotations

import os
import socket
from typing import Annotated

from pydantic import Field

from dsec.platform.settings import Settings


class ToolSettings(Settings):
    """One replica. A tool's secret `NAME` is read from the variable `DSEC_SECRET_NAME`."""

    tool_replica: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """How this replica is named in what it publishes."""
    tool_ack_wait_s: Annotated[float, Field(ge=1, le=300)] = 5.0
    """A killed replica's calls are another's after this. Longer calls signal themselves."""
    tool_turns_in_flight_max: Annotated[int, Field(ge=1, le=1024)] = 16
    """Turns that this replica works on at a time; the calls of one run side by side."""
    tool_calls_in_flight_max: Annotated[int, Field(ge=1, le=1024)] = 32
    """Calls, and so processes, at a time."""
    tool_idle_processes_max: Annotated[int, Field(ge=0, le=1024)] = 16
    """Processes kept warm for the next call of their tools."""
    tool_memory_bytes_max: Annotated[int, Field(ge=1 << 28)] = 4 << 30
    """What one tool may allocate."""
    tool_specs_max: Annotated[int, Field(ge=1)] = 256
    """Specs kept in memory."""
    tool_log_wait_s: Annotated[float, Field(ge=0)] = 10.0
    """How long one delivery waits for the recorder."""
    tool_absent_s_max: Annotated[float, Field(ge=0)] = 60.0
    """What a log that has got to the call has not had for so long is `spec_not_found`."""
    tool_unknown_grace_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """How long after its deadline a call that another replica began is given up as
    `outcome_unknown`: clocks differ, and an answer may be on its way."""
    tool_retry_s_min: Annotated[float, Field(gt=0)] = 0.2
    """The first wait before a call that could not be handled is delivered again."""
    tool_retry_s_max: Annotated[float, Field(gt=0)] = 30.0
    """Waits double up to this."""
    tool_stop_s_max: Annotated[float, Field(gt=0)] = 25.0
    """How long a stop waits for the calls at hand; then another replica gets them."""
