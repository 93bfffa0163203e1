"""Settings every service shares: where the bus, the log and the object store are.

Each service has settings of its own beside these (`<service>/settings.py`); all come from the
environment, so that nothing has to be configured for the embedded stack, which sets them.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """The shared part. Read from `DSEC_*` variables."""

    model_config = SettingsConfigDict(env_prefix="DSEC_", extra="ignore")

    nats_url: str = Field(default="nats://127.0.0.1:4222", description="the JetStream server")
    database_url: str = Field(
        default="postgresql://127.0.0.1:5432/dsec", description="PostgreSQL, any 15 to 18"
    )
    object_store_url: str = Field(default="", description="file:///directory; empty: none")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


def configure_logging(service: str, level: str) -> None:
    """One line an event on standard error: time, level, service, logger, message."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        force=True,
        format=f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s",
    )
    logging.getLogger("nats").setLevel(logging.WARNING)
