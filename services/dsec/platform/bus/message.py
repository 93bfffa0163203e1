"""One message from a durable consumer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from nats.aio.msg import Msg
from pydantic import ValidationError

from dsec.platform.bus.errors import BadMessage, BusError
from dsec.platform.crash_points import reached
from dsec_contracts.catalog import parse
from dsec_contracts.envelope import Envelope, EnvelopeError, Event

_E = TypeVar("_E", bound=Event)

_V1_TOKENS = 9
"""$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer's sequence>.<time>.<pending>;
newer servers put a domain and an account before the stream, and may append a token."""


@dataclass(slots=True)
class Message:
    """One message from a durable consumer."""

    subject: str
    headers: Mapping[str, str]
    data: bytes
    sequence: int
    delivered: int
    time: datetime
    _raw: Msg = field(repr=False)
    consumer_sequence: int = 0
    """The consumer's own number for this delivery, from 1, redeliveries included; 0 where the
    message did not come from one."""

    @classmethod
    def wrap(cls, raw: Msg) -> Message:
        """Read the JetStream metadata of a raw message.

        Raises:
            BusError: it has none.
        """
        # Read here and not by the client, whose metadata costs more than twice as much: this
        # is done for every message there is.
        tokens = raw.reply.split(".")
        count = len(tokens)
        if count < _V1_TOKENS or tokens[0] != "$JS" or tokens[1] != "ACK":
            raise BusError(f"{raw.subject}: no delivery of a consumer ({raw.reply!r})")
        at = 4 if count == _V1_TOKENS else 6
        return cls(
            raw.subject,
            raw.headers or {},
            raw.data,
            int(tokens[at + 1]),
            int(tokens[at]),
            time_of(int(tokens[at + 3])),
            raw,
            int(tokens[at + 2]),
        )

    def envelope(self) -> Envelope:
        """The CloudEvents attributes.

        Raises:
            BadMessage: they are missing or malformed.
        """
        try:
            return Envelope.parse(self.headers)
        except EnvelopeError as error:
            raise BadMessage(str(error)) from error

    def event(self) -> Event:
        """The event.

        Raises:
            BadMessage: the body does not fit the schema of its type.
            UnknownEvent: a newer type than this version knows.
        """
        try:
            return parse(self.envelope().type, self.data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise BadMessage(f"{where}: {first['msg']}") from error

    def event_of(self, kind: type[_E]) -> _E:
        """The event, on a subject that holds nothing but this kind.

        Raises:
            BadMessage: also where it is of another kind.
            UnknownEvent: see `event`.
        """
        event = self.event()
        if not isinstance(event, kind):
            raise BadMessage(f"{type(event).__name__} on {self.subject}")
        return event

    async def ack(self) -> None:
        """Done. Fire and forget: a lost acknowledgement means one more delivery."""
        reached("ack.before")
        await self._raw.ack()
        reached("ack.after")

    async def nak(self, delay_s: float) -> None:
        """Not now; deliver again after `delay_s`."""
        await self._raw.nak(delay=delay_s)

    async def in_progress(self) -> None:
        """Still at it: the acknowledgement clock starts anew."""
        await self._raw.in_progress()

    async def term(self) -> None:
        """Never deliver again."""
        await self._raw.term()


def time_of(nanoseconds: int) -> datetime:
    """The time of a message, to the microsecond.

    The log keeps the time of its last message and compares it with the stream's: whoever reads a
    time has to round it as it was rounded when it was kept.
    """
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)
