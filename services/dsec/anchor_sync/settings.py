"""Settings of anchor-sync, all from `DSEC_*` variables."""

from __future__ import annotations

import os
import socket
from typing import Annotated

from pydantic import Field

from dsec.platform.settings import Settings


class AnchorSyncSettings(Settings):
    """One replica."""

    anchor_replica: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    """How this replica is named in what it publishes."""
    anchor_ack_wait_s: Annotated[float, Field(ge=1, le=300)] = 5.0
    """A killed replica's anchors are another's after this. Slow stores signal themselves."""
    anchors_in_flight_max: Annotated[int, Field(ge=1, le=256)] = 8
    """Anchors that this replica stores at a time. Each may take `ANCHOR_BLOB_BYTES_MAX` twice."""
    anchor_absent_s_max: Annotated[float, Field(ge=0)] = 60.0
    """A blob that its worker put aside and that the store has not had for so long is lost."""
    anchor_retry_s_min: Annotated[float, Field(gt=0)] = 0.2
    """The first wait before an anchor that could not be stored is delivered again."""
    anchor_retry_s_max: Annotated[float, Field(gt=0)] = 10.0
    """Waits double up to this. A store that is away is waited for without end: the anchors wait in
    the stream."""
    anchor_stop_s_max: Annotated[float, Field(gt=0)] = 25.0
    """How long a stop waits for the anchors at hand; then another replica gets them."""
