"""Settings every service shares: where the bus, the log and the object store are.

Each service has settings of its own beside these (`<service>/settings.py`); all come from the
environment, so that nothing has to be configured for the embedded stack, which sets them.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from dsec.platform.object_s3 import credentials_of
from dsec.platform.user_limits import UserLimits

_OTEL = "OTEL_"


def _otel_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_OTEL)}


class SettingsError(ValueError):
    """A variable that cannot be: which, and why. Never what it holds, which may be a secret."""


def _told(error: ErrorDetails) -> str:
    """Which variable is wrong, and why."""
    where = ".".join(map(str, error["loc"]))
    return f"DSEC_{where.upper()}: {error['msg']}" if where else error["msg"]


class Settings(BaseSettings):
    """The shared part. Read from `DSEC_*` variables."""

    model_config = SettingsConfigDict(env_prefix="DSEC_", extra="ignore")

    def __init__(self, **values: Any) -> None:
        """Read them.

        Raises:
            SettingsError: one cannot be.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            told = map(_told, error.errors(include_input=False, include_url=False))
            raise SettingsError("; ".join(told)) from None

    nats_url: str = Field(
        default="nats://127.0.0.1:4222",
        description="the JetStream server, or nodes of a cluster, separated by commas",
    )
    nats_replicas: Annotated[int, Field(ge=1, le=5)] | None = Field(
        default=None,
        description="how many nodes of a cluster keep the stream; what depends on it (consumers, "
        "the scheduler's lease) is kept as often. Unset: a live stream stays as it is, and a new "
        "one is kept once",
    )
    database_url: str = Field(
        default="postgresql://127.0.0.1:5432/dsec", description="PostgreSQL, any 15 to 18"
    )
    object_store_url: str = Field(
        default="",
        description="file:///directory or s3://bucket/prefix?endpoint=URL&region=NAME; empty: none",
    )
    object_store_credentials: dict[str, str] = Field(
        default_factory=lambda: credentials_of(os.environ),
        repr=False,
        description="AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN of the "
        "environment; a worker gets them with its settings, since they are not for user code",
    )
    otlp_endpoint: str = Field(
        default="",
        description="receiver of traces and metrics, OTLP over HTTP (http://HOST:4318); empty: "
        "what OTEL_EXPORTER_OTLP_ENDPOINT says, and without that none",
    )
    otel: dict[str, str] = Field(
        default_factory=_otel_variables,
        repr=False,
        description="OpenTelemetry's own variables, all that begin with OTEL_; a worker gets them "
        "with its settings, since the receiver's credentials are not for user code",
    )
    user_open_files_max: Annotated[int, Field(ge=64)] = 4096
    """Files, sockets included, that a process which runs user code may have open."""
    user_file_bytes_max: Annotated[int, Field(ge=1 << 20)] = 4 << 30
    """How large a file such a process may make."""
    user_processes_max: Annotated[int, Field(ge=0)] = 256
    """How many processes such a process may start that run at a time."""
    user_cpus_max: Annotated[int, Field(ge=1)] | None = None
    """How many cores such a process and what it starts may use together. Unset: all of them."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """What a service writes to standard error: this and what is graver."""

    def user_limits(self, memory_bytes_max: int) -> UserLimits:
        """The bounds of a process that runs user code."""
        return UserLimits(
            memory_bytes_max,
            self.user_open_files_max,
            self.user_file_bytes_max,
            self.user_processes_max,
            self.user_cpus_max,
        )


def configure_logging(service: str, level: str) -> None:
    """One line an event on standard error: time, level, service, logger, message."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        force=True,
        format=f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s",
    )
    logging.getLogger("nats").setLevel(logging.WARNING)
