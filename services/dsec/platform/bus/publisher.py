"""Publishing: one attempt in the common case, the same message again while the bus is away."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

import nats.errors
import nats.js.errors
from nats.aio.client import Client as NatsClient

from dsec.platform.bus.errors import (
    BusError,
    BusUnavailable,
    PublishRefused,
    Refusal,
    TooLarge,
    Undecided,
)
from dsec.platform.bus.message import Message
from dsec.platform.bus.retry import AWAY, PUBLISHING
from dsec.platform.crash_points import reached
from dsec_contracts import subjects
from dsec_contracts.envelope import Envelope, Event

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 5.0
HEADERS_BYTES_MAX = 65_535
"""Of a message in a stream: the server stores the length in two bytes."""
DEAD_ERROR_CHARS_MAX = 2_000

_WRONG_LAST_SEQUENCE = 10071
_UNDECIDED = {10158, 10164}
"""A stream with replicas answers so while a publish that expects the same subject's sequence, or
this very message sent before, waits for the other nodes. It says nothing of how that ends."""
_HOPELESS = (
    nats.errors.BadHeaderError,
    nats.errors.BadSubjectError,
    nats.errors.MaxPayloadError,
)
"""What the client itself refuses: no attempt will end differently."""
_NO_HEADER_NAME = re.compile(r"[^!#$%&'*+\-.^_`|~0-9A-Za-z]")
_FIRST_AND_LAST_LINE_BYTES = len(b"NATS/1.0\r\n\r\n")
_CHAR_BYTES_MAX = 4
_LINE_BYTES = len(b": \r\n")


def headers_size_bytes(headers: Mapping[str, str]) -> int:
    """What headers take in a message, to the byte as the client writes them (it strips them)."""
    text = "".join([part.strip() for line in headers.items() for part in line])
    return len(text.encode()) + _LINE_BYTES * len(headers) + _FIRST_AND_LAST_LINE_BYTES


class Publisher:
    """The half of a bus that publishes."""

    def __init__(self, nc: NatsClient) -> None:
        self._nc = nc
        self._js = nc.jetstream(timeout=PUBLISH_TIMEOUT_S)
        self._turn = asyncio.Lock()
        self._in_turn = False
        """Whether fenced publishes go one at a time: a stream with replicas takes no two at once
        that expect the same subject's sequence, and all of a worker expect that of its fence."""

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit for payload and headers together."""
        return int(self._nc.max_payload)

    async def publish(
        self,
        event: Event,
        key: object,
        *,
        source: str,
        time: datetime,
        event_id: str,
        session_id: UUID | None = None,
        cause: str | None = None,
        traceparent: str | None = None,
        fence: str | None = None,
        expected_sequence: int | None = None,
        expected_of: str | None = None,
    ) -> int:
        """Publish an event and return its position in the stream.

        Args:
            event_id: the same for every attempt to send the same event.
            fence: the worker that publishes; refused once it has been fenced.
            expected_sequence: the last sequence of the subject that this publish builds on.
            expected_of: that of another subject, or of all subjects that one with wildcards fits.

        Raises:
            PublishRefused: fenced, or the expected sequence is no longer the last.
            TooLarge: over the server's limit; nothing was sent.
            BusUnavailable: not acknowledged for as long as `PUBLISHING` waits.
        """
        subject = subjects.subject(event.event_name(), key)
        headers = Envelope(
            id=event_id,
            type=event.event_type(),
            source=source,
            time=time,
            subject=str(session_id) if session_id else None,
            causationid=cause,
            traceparent=traceparent,
        ).headers()
        refusal: Refusal = "expected_sequence"
        if fence is not None:
            refusal = "fenced"
            headers["Nats-Expected-Last-Subject-Sequence"] = "0"
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = subjects.fence(fence)
        elif expected_sequence is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_sequence)
            if expected_of is not None:
                headers["Nats-Expected-Last-Subject-Sequence-Subject"] = expected_of
        name = event.event_name()
        reached(f"publish.{name}.before")
        position = await self._send(subject, event.body(), headers, refusal)
        reached(f"publish.{name}.after")
        return position

    async def publish_raw(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """Publish bytes (a fence, a dead letter) into the stream."""
        return await self._send(subject, data, headers, "expected_sequence")

    async def publish_transient(
        self, event: Event, key: object, *, source: str, time: datetime, event_id: str
    ) -> None:
        """Publish what nobody waits for and the log does not hold: a heartbeat."""
        subject = subjects.subject(event.event_name(), key)
        headers = Envelope(event_id, event.event_type(), source, time).headers()
        data = event.body()
        self._check_size(subject, data, headers)
        await self._nc.publish(subject, data, headers=headers)

    async def fence(self, worker: str, source: str) -> int:
        """Refuse all later publishes of a worker. What it got in before counts."""
        reached("fence.before")
        position = await self.publish_raw(subjects.fence(worker), b"", {"ce-source": source})
        reached("fence.after")
        return position

    async def dead_letter(self, message: Message, consumer: str, error: str) -> None:
        """Put a message aside for people, with its error, bytes and headers."""
        text = error.encode("ascii", "backslashreplace").decode().replace("\n", " ")
        ours = {
            "dead-error": text[:DEAD_ERROR_CHARS_MAX],
            "dead-subject": message.subject,
            "dead-sequence": str(message.sequence),
            "Nats-Msg-Id": f"dead.{consumer}.{message.sequence}",
        }
        headers = _dead(message.headers) | ours
        if headers_size_bytes(headers) > HEADERS_BYTES_MAX:
            headers = ours | {"dead-cut": "headers"}
        subject = subjects.dead_letter(consumer)
        try:
            await self.publish_raw(subject, message.data, headers)
        except TooLarge:  # the bytes fitted once, without the error
            room = self.max_payload_bytes // 2
            await self.publish_raw(subject, message.data[:room], {**headers, "dead-cut": "body"})

    # -- sending -------------------------------------------------------------------------------

    def _check_size(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        limit = self.max_payload_bytes
        chars = sum(map(len, headers)) + sum(map(len, headers.values()))
        bound = len(data) + _CHAR_BYTES_MAX * chars + _LINE_BYTES * len(headers)
        if bound + _FIRST_AND_LAST_LINE_BYTES <= limit:
            return  # nearly always so, and the exact size costs five times as much
        size = len(data) + headers_size_bytes(headers)
        if size > limit:
            raise TooLarge(subject, size, limit)

    async def _send(
        self, subject: str, data: bytes, headers: dict[str, str], refusal: Refusal
    ) -> int:
        self._check_size(subject, data, headers)
        try:
            # The common case first: no retry machinery on the hot path.
            if not self._in_turn or refusal != "fenced":
                return await self._send_once(subject, data, headers, refusal)
        except Undecided:
            self._in_turn = self._in_turn or refusal == "fenced"
        except AWAY as error:
            log.warning("publish to %s not acknowledged (%r), sending again", subject, error)
        if refusal != "fenced" or not self._in_turn:
            return await self._send_again(subject, data, headers, refusal)
        async with self._turn:
            return await self._send_again(subject, data, headers, refusal)

    async def _send_again(
        self, subject: str, data: bytes, headers: dict[str, str], refusal: Refusal
    ) -> int:
        try:
            async for attempt in PUBLISHING.attempts():
                with attempt:
                    return await self._send_once(subject, data, headers, refusal)
        except (nats.errors.Error, TimeoutError, OSError) as error:
            raise BusUnavailable(f"{subject} was not acknowledged: {error!r}") from error
        raise AssertionError("unreachable")

    async def _send_once(
        self, subject: str, data: bytes, headers: dict[str, str], refusal: Refusal
    ) -> int:
        try:
            ack = await self._js.publish(subject, data, headers=headers)
        except nats.js.errors.APIError as error:
            if error.err_code == _WRONG_LAST_SEQUENCE:
                raise PublishRefused(refusal, f"{subject}: {error.description}") from error
            if error.err_code in _UNDECIDED:
                raise Undecided(f"{subject}: {error.description}") from error
            if error.code == 503:  # full, no leader, out of resources: all pass
                raise BusUnavailable(f"{subject}: {error.description}") from error
            raise BusError(f"{subject}: {error.description}") from error
        except nats.js.errors.NoStreamResponseError as error:
            raise BusUnavailable(f"{subject}: no stream answers") from error
        except _HOPELESS as error:
            raise BusError(f"{subject}: {error!r}") from error
        return int(ack.seq)


def _dead(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a dead letter's message, under names that may be sent: the server lets
    anything in, the client does not."""
    return {
        f"dead-{_NO_HEADER_NAME.sub('_', name)}": value
        for name, value in headers.items()
        if not name.startswith("Nats-")
    }
