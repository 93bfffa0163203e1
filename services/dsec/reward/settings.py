"""Settings of the reward service, all from `DSEC_*` variables."""

from __future__ import annotations

import os
import socket
from typing import Annotated

from pydantic import Field

from dsec.platform.settings import Settings


class RewardSettings(Settings):
    """One replica. A service's secret `NAME` is read from the variable `DSEC_SECRET_NAME`."""

    reward_replica: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """How this replica is named in what it publishes."""
    reward_ack_wait_s: Annotated[float, Field(ge=1, le=300)] = 5.0
    """A killed replica's message is another's after this. Longer work signals itself."""
    reward_deadline_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """A function that takes longer for one step is `reward_deadline`."""
    reward_memory_bytes_max: Annotated[int, Field(ge=1 << 28)] = 4 << 30
    """What the process that runs the functions may allocate."""
    reward_ticks_waiting_max: Annotated[int, Field(ge=1, le=10_000)] = 256
    """Ticks that wait for outside services at a time; others that would are left for later, and
    those that ask nobody pass them."""
    reward_service_retry_s: Annotated[float, Field(gt=0)] = 1.0
    """When a tick is looked at again that found too many waiting."""
    reward_recheck_s: Annotated[float, Field(ge=0)] = 60.0
    """How often some rows of each function are scored again in a fresh process, to find one that
    keeps state between calls; 0: never."""
    reward_specs_max: Annotated[int, Field(ge=1)] = 256
    """Specs kept in memory."""
    reward_spec_wait_s: Annotated[float, Field(ge=0)] = 10.0
    """How long one delivery waits for the recorder to come to its position."""
    reward_absent_s_max: Annotated[float, Field(ge=0)] = 60.0
    """What a log that has got to the step, or a store that is up, has not had for so long is
    `spec_not_found` or `blob_not_found`. A log or store that is away is waited for, for ever."""
    reward_retry_s_min: Annotated[float, Field(gt=0)] = 0.2
    """The first wait before a message that could not be handled is delivered again."""
    reward_retry_s_max: Annotated[float, Field(gt=0)] = 30.0
    """Waits double up to this."""
    reward_stop_s_max: Annotated[float, Field(gt=0)] = 25.0
    """How long a stop waits for the message at hand; then another replica gets it."""
