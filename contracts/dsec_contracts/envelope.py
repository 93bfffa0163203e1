"""The envelope: CloudEvents 1.0 in NATS headers (binary mode), and what every event has in common.

A message is headers (who, what, when, why) and a JSON body (the event). Headers are ASCII; user
text belongs in the body. A body has two parts: the *fact*, which is compared and hashed, and the
*circumstance* (attempt, worker, times, reasons), which never is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

SPEC_VERSION = "1.0"


class EnvelopeError(ValueError):
    """Headers that are no CloudEvents envelope. Names the header."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The attributes of one message.

    `id` is unique per source; `subject` is the session id where the message is about one session;
    `causationid` is the natural key of what caused it, `<session id>/<key>`.
    """

    id: str
    type: str
    source: str
    time: datetime
    subject: str | None = None
    causationid: str | None = None
    traceparent: str | None = None

    def headers(self) -> dict[str, str]:
        """The NATS headers, `Nats-Msg-Id` included."""
        result = {
            "ce-specversion": SPEC_VERSION,
            "ce-id": self.id,
            "ce-type": self.type,
            "ce-source": self.source,
            "ce-time": self.time.astimezone(UTC).isoformat(timespec="microseconds"),
            "Nats-Msg-Id": self.id,
        }
        for name, value in (
            ("ce-subject", self.subject),
            ("ce-causationid", self.causationid),
            ("traceparent", self.traceparent),
        ):
            if value is not None:
                result[name] = value
        for name, value in result.items():
            if not value.isascii() or not value.isprintable():
                raise EnvelopeError(f"header {name}: {value!r} is not printable ASCII")
        return result

    @classmethod
    def parse(cls, headers: Mapping[str, str] | None) -> Self:
        """Read the attributes back.

        Raises:
            EnvelopeError: a required header is missing or malformed.
        """
        headers = headers or {}
        for name in ("ce-id", "ce-type", "ce-source"):
            if not headers.get(name):
                raise EnvelopeError(f"header {name} is missing")
        raw_time = headers.get("ce-time", "")
        try:
            time = datetime.fromisoformat(raw_time)
        except ValueError:
            raise EnvelopeError(f"header ce-time: {raw_time!r} is no RFC 3339 time") from None
        if time.tzinfo is None:
            raise EnvelopeError(f"header ce-time: {raw_time!r} has no time zone")
        return cls(
            id=headers["ce-id"],
            type=headers["ce-type"],
            source=headers["ce-source"],
            time=time,
            subject=headers.get("ce-subject"),
            causationid=headers.get("ce-causationid"),
            traceparent=headers.get("traceparent"),
        )


class Part(BaseModel):
    """A part of an event body: frozen; fields of newer versions are kept as they came."""

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
    )


class Event(Part):
    """An immutable fact, past tense. The class name says its type: `SessionStarted` version 1 is
    `session.started.v1` on subject `dsec.session.started.<key>`, handled by `on_session_started`.
    """

    version: ClassVar[int] = 1
    durable: ClassVar[bool] = True
    """False for what never enters the log (heartbeats)."""
    columns: ClassVar[bool] = False
    """True for a hot event: one message carries one tick of a lane, in parallel arrays."""

    @classmethod
    def event_name(cls) -> str:
        """`session.started`, from the class name."""
        noun, *verb = re.findall(r"[A-Z][a-z0-9]*", cls.__name__)
        return f"{noun.lower()}.{'_'.join(verb).lower()}"

    @classmethod
    def event_type(cls) -> str:
        """`session.started.v1`."""
        return f"{cls.event_name()}.v{cls.version}"

    @classmethod
    def handler_name(cls) -> str:
        """`on_session_started`."""
        return "on_" + cls.event_name().replace(".", "_")

    def body(self) -> bytes:
        """The JSON body."""
        return self.model_dump_json().encode()

    def fact_value(self) -> Any:
        """The fact as plain values, ready for the canonical encoding."""
        fact: BaseModel = getattr(self, "fact")  # noqa: B009 - columns have no `fact`
        return fact.model_dump(mode="json", exclude_none=True)
