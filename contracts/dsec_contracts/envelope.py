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
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler

SPEC_VERSION = "1.0"
HEADER_CHARS_MAX = 1024
PROSE_CHARS_MAX = 8192


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
        """The NATS headers, `Nats-Msg-Id` included.

        Raises:
            EnvelopeError: an attribute cannot be a header's value, or `time` has no time zone.
        """
        if self.time.tzinfo is None:
            raise EnvelopeError(f"header ce-time: {self.time} has no time zone")
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
            _check_header(name, value)
        return result

    @classmethod
    def parse(cls, headers: Mapping[str, str] | None) -> Self:
        """Read the attributes back.

        Raises:
            EnvelopeError: a required header is missing or malformed.
        """
        # Some clients write header names in a case of their own (`Ce-Id`).
        given = {name.lower(): value for name, value in (headers or {}).items()}
        for name in ("ce-id", "ce-type", "ce-source", "ce-time"):
            if not given.get(name):
                raise EnvelopeError(f"header {name} is missing")
        version = given.get("ce-specversion", SPEC_VERSION)
        if version != SPEC_VERSION:
            raise EnvelopeError(f"header ce-specversion: {version[:100]!r} is not {SPEC_VERSION}")
        for name in _ATTRIBUTES:
            if name in given:
                _check_header(name, given[name])
        return cls(
            id=given["ce-id"],
            type=given["ce-type"],
            source=given["ce-source"],
            time=_parse_time(given["ce-time"]),
            subject=given.get("ce-subject"),
            causationid=given.get("ce-causationid"),
            traceparent=given.get("traceparent"),
        )


_ATTRIBUTES = (
    "ce-id",
    "ce-type",
    "ce-source",
    "ce-time",
    "ce-subject",
    "ce-causationid",
    "traceparent",
)


def _check_header(name: str, value: str) -> None:
    # Not printable: a line break would begin another header. At the edges: spaces get lost.
    if not value.isascii() or not value.isprintable() or value != value.strip() or not value:
        raise EnvelopeError(f"header {name}: {value[:100]!r} is not trimmed, printable ASCII")
    if len(value) > HEADER_CHARS_MAX:
        raise EnvelopeError(f"header {name} has {len(value)} characters, over {HEADER_CHARS_MAX}")


def _parse_time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            raise EnvelopeError(f"header ce-time: {text!r} has no time zone")
        return time.astimezone(UTC)
    except OverflowError:
        raise EnvelopeError(f"header ce-time: {text!r} is outside the years 1 to 9999") from None
    except EnvelopeError:
        raise
    except ValueError:
        raise EnvelopeError(f"header ce-time: {text!r} is no RFC 3339 time") from None


def _prose(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = str.__str__(value).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    return text if len(text) <= PROSE_CHARS_MAX else text[: PROSE_CHARS_MAX - 1] + "…"


Prose = Annotated[str, BeforeValidator(_prose)]
"""A sentence for people, often the message of somebody's exception: whatever is in it must not keep
an event from being written. Lone surrogates, which UTF-8 lacks, and NUL, which PostgreSQL lacks,
are escaped; what is longer than `PROSE_CHARS_MAX` is cut."""


class Part(BaseModel):
    """A part of an event body: frozen; fields of newer versions are kept as they came."""

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        ser_json_bytes="base64",
        val_json_bytes="base64",
        ser_json_inf_nan="constants",
        # Of thirty events a process uses a few: each is made ready when it is first used.
        defer_build=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The JSON Schema, with what is written below each field."""
        from dsec_contracts import docstrings

        made = handler(core_schema)
        docstrings.describe(cls, handler.resolve_ref_schema(made))
        return made


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
