"""The bus: the only module that knows NATS.

Every publish of an event is a JetStream publish whose acknowledgement is read: a plain publish to
a full stream vanishes without an error. Sizes are checked, headers included, before sending: an
oversized publish closes the client for good while the process looks alive. What is not
acknowledged is sent again under the same message id, for as long as `publish_wait_s_max` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Self
from uuid import UUID

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from pydantic import ValidationError
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from dsec_contracts import subjects
from dsec_contracts.catalog import parse
from dsec_contracts.envelope import Envelope, EnvelopeError, Event

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 5.0
PUBLISH_WAIT_S_MAX = 600.0
CONNECT_WAIT_S_MAX = 30.0
ACK_WAIT_S = 5.0
DUPLICATE_WINDOW_S = 120
FETCH_PAUSE_S = 0.2

_WRONG_LAST_SEQUENCE = {10071, 10164}


class BusError(Exception):
    """Something about the bus."""


class BusUnavailable(BusError):
    """The bus could not be reached in time."""


class PublishRefused(BusError):
    """The server refused a publish: the writer is fenced, or somebody wrote before it."""

    def __init__(self, reason: Literal["fenced", "expected_sequence"], detail: str) -> None:
        super().__init__(f"publish refused ({reason}): {detail}")
        self.reason = reason


class TooLarge(BusError):
    """A message over the server's limit. It was not sent."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"a message for {subject} has {size_bytes} bytes with its headers; the server takes "
            f"{limit_bytes}: put the large part into the object store and send its key"
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class BadMessage(BusError):
    """A message that is no event of this system, now or after any retry."""


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

    @classmethod
    def wrap(cls, raw: Msg) -> Message:
        """Read the JetStream metadata of a raw message."""
        meta = raw.metadata
        return cls(
            raw.subject,
            raw.headers or {},
            raw.data,
            meta.sequence.stream,
            meta.num_delivered or 1,
            meta.timestamp,
            raw,
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

    async def ack(self) -> None:
        """Done. Fire and forget: a lost acknowledgement means one more delivery."""
        await self._raw.ack()

    async def nak(self, delay_s: float) -> None:
        """Not now; deliver again after `delay_s`."""
        await self._raw.nak(delay=delay_s)

    async def in_progress(self) -> None:
        """Still at it: the acknowledgement clock starts anew."""
        await self._raw.in_progress()

    async def term(self) -> None:
        """Never deliver again."""
        await self._raw.term()


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How the stream is made. Compared with the live one at every start."""

    max_bytes: int = 8 << 30
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the stream holds."""

    first_sequence: int
    last_sequence: int
    messages: int
    bytes: int
    max_bytes: int
    created: datetime


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """Where a durable consumer stands. `floor`: all up to here is acknowledged."""

    name: str
    pending: int
    ack_pending: int
    floor: int
    delivered: int


class Consumer:
    """A durable pull consumer."""

    def __init__(self, js: JetStreamContext, sub: JetStreamContext.PullSubscription, name: str):
        self._js = js
        self._sub = sub
        self.name = name

    async def fetch(self, batch: int, timeout_s: float) -> list[Message]:
        """Up to `batch` messages: those there are, or the first to come; empty on time-out."""
        try:
            raw = await self._sub.fetch(batch, timeout=timeout_s)
        except (TimeoutError, nats.errors.TimeoutError):
            return []
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionReconnectingError):
            raise
        except nats.errors.Error as error:
            log.warning("fetch of %s failed, trying again: %r", self.name, error)
            await asyncio.sleep(FETCH_PAUSE_S)
            await self._still_there()
            return []
        return [Message.wrap(msg) for msg in raw]

    async def _still_there(self) -> None:
        """A durable that is gone never delivers again, however often it is asked."""
        try:
            await self._sub.consumer_info()
        except nats.js.errors.NotFoundError as error:
            raise BusError(f"consumer {self.name} is gone from the server") from error
        except (nats.errors.Error, TimeoutError):
            return  # the server is away; the next fetch asks it again

    async def state(self) -> ConsumerState:
        """Where it stands."""
        return _consumer_state(await self._sub.consumer_info())

    async def close(self) -> None:
        """Stop receiving. The durable itself stays."""
        with contextlib.suppress(nats.errors.Error):
            await self._sub.unsubscribe()


def _consumer_state(info: api.ConsumerInfo) -> ConsumerState:
    floor = info.ack_floor.stream_seq if info.ack_floor else 0
    delivered = info.delivered.stream_seq if info.delivered else 0
    return ConsumerState(
        info.name, info.num_pending or 0, info.num_ack_pending or 0, floor, delivered
    )


class Lease:
    """A lease in a key-value bucket: one holder at a time, lost when it is not renewed."""

    def __init__(self, kv: Any, key: str, holder: str) -> None:
        self._kv = kv
        self._key = key
        self._holder = holder.encode()
        self._revision: int | None = None

    async def renew(self) -> bool:
        """Take or keep the lease. False: somebody else holds it, or the bus is away."""
        try:
            if self._revision is None:
                self._revision = await self._kv.create(self._key, self._holder)
            else:
                self._revision = await self._kv.update(self._key, self._holder, last=self._revision)
        except (nats.js.errors.Error, nats.errors.Error, TimeoutError):
            self._revision = None
            return False
        return True

    async def release(self) -> None:
        """Give it up, if it is ours."""
        if self._revision is not None:
            with contextlib.suppress(nats.js.errors.Error, nats.errors.Error, TimeoutError):
                await self._kv.delete(self._key, last=self._revision)
            self._revision = None


class Bus:
    """A connection to the bus."""

    def __init__(self, nc: NatsClient, name: str) -> None:
        self._nc = nc
        self._js = nc.jetstream(timeout=PUBLISH_TIMEOUT_S)
        self.name = name

    @classmethod
    async def connect(cls, url: str, name: str) -> Self:
        """Connect, and stay connected: the client reconnects for ever.

        Raises:
            BusUnavailable: no server within `CONNECT_WAIT_S_MAX`.
        """

        async def on_error(error: Exception) -> None:
            log.warning("bus: %r", error)

        retrying = AsyncRetrying(
            stop=stop_after_delay(CONNECT_WAIT_S_MAX),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            retry=retry_if_exception_type((OSError, nats.errors.Error, TimeoutError)),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    nc = await nats.connect(
                        url,
                        name=name,
                        error_cb=on_error,
                        allow_reconnect=True,
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=0.2,
                        connect_timeout=2,
                    )
        except (OSError, nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(
                f"no NATS server answers at {_without_secret(url)} within "
                f"{CONNECT_WAIT_S_MAX:.0f} s ({error!r}): "
                "is it running, and is DSEC_NATS_URL right?"
            ) from error
        return cls(nc, name)

    async def close(self) -> None:
        """Flush and close."""
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            await asyncio.wait_for(self._nc.flush(), 2)
        await self._nc.close()

    @property
    def connected(self) -> bool:
        """Whether a server is connected now."""
        return bool(self._nc.is_connected)

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit for payload and headers together."""
        return int(self._nc.max_payload)

    # -- streams -------------------------------------------------------------------------------

    async def ensure_stream(self, options: StreamOptions | None = None) -> None:
        """Make the stream, or bring the live one to our settings, field by field.

        Raises:
            BusError: a setting that cannot be changed differs.
        """
        options = options or StreamOptions()
        wanted = api.StreamConfig(
            name=subjects.STREAM,
            subjects=subjects.STREAM_SUBJECTS,
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_bytes=options.max_bytes,
            num_replicas=options.replicas,
            duplicate_window=DUPLICATE_WINDOW_S,
            allow_direct=True,
        )
        try:
            await self._js.add_stream(wanted)
        except nats.js.errors.BadRequestError as error:
            if error.err_code != 10058:  # exists with another configuration
                raise BusError(f"the stream cannot be made: {error.description}") from error
            try:
                await self._js.update_stream(wanted)
            except nats.js.errors.APIError as refused:
                raise BusError(
                    f"stream {subjects.STREAM} exists with settings that cannot be brought to "
                    f"ours: {refused.description}"
                ) from refused

    async def stream_state(self) -> StreamState:
        """What the stream holds."""
        raw = await self._api(f"STREAM.INFO.{subjects.STREAM}")
        state = raw["state"]
        return StreamState(
            state["first_seq"],
            state["last_seq"],
            state["messages"],
            state["bytes"],
            raw["config"]["max_bytes"],
            datetime.fromisoformat(raw["created"]),
        )

    async def _api(self, call: str, body: bytes = b"") -> dict[str, Any]:
        reply = await self._nc.request(f"$JS.API.{call}", body, timeout=PUBLISH_TIMEOUT_S)
        result: dict[str, Any] = json.loads(reply.data)
        if "error" in result:
            raise BusError(f"{call}: {result['error'].get('description')}")
        return result

    async def last_sequence(self, subject: str) -> int:
        """The sequence of the last message on a subject; 0 if there is none."""
        try:
            message = await self._js.get_last_msg(subjects.STREAM, subject)
        except nats.js.errors.NotFoundError:
            return 0
        return int(message.seq or 0)

    async def purge(self, subject_filter: str, before_sequence: int) -> None:
        """Remove the messages of a subject filter that lie before a sequence."""
        await self._js.purge_stream(subjects.STREAM, subject=subject_filter, seq=before_sequence)

    # -- publishing ----------------------------------------------------------------------------

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
    ) -> int:
        """Publish an event and return its position in the stream.

        Args:
            event_id: the same for every attempt to send the same event.
            fence: the worker that publishes; refused once it has been fenced.
            expected_sequence: the last sequence of the subject that this publish builds on.

        Raises:
            PublishRefused: fenced, or the expected sequence is no longer the last.
            TooLarge: over the server's limit; nothing was sent.
            BusUnavailable: not acknowledged within `PUBLISH_WAIT_S_MAX`.
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
        if fence is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = "0"
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = subjects.fence(fence)
        elif expected_sequence is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_sequence)
        reason: Literal["fenced", "expected_sequence"] = (
            "fenced" if fence is not None else "expected_sequence"
        )
        return await self._send(subject, event.body(), headers, reason)

    async def publish_raw(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """Publish bytes (a fence, a dead letter) into the stream."""
        return await self._send(subject, data, headers, "expected_sequence")

    def _check_size(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        size = len(data) + sum(len(k) + len(v) + 4 for k, v in headers.items()) + 12
        if size > self.max_payload_bytes:
            raise TooLarge(subject, size, self.max_payload_bytes)

    async def _send(
        self,
        subject: str,
        data: bytes,
        headers: dict[str, str],
        refusal: Literal["fenced", "expected_sequence"],
    ) -> int:
        self._check_size(subject, data, headers)
        try:
            # The common case first: no retry machinery on the hot path.
            return await self._send_once(subject, data, headers, refusal)
        except (BusUnavailable, nats.errors.Error, TimeoutError) as first:
            log.warning("publish to %s not acknowledged (%r), sending again", subject, first)
        retrying = AsyncRetrying(
            stop=stop_after_delay(PUBLISH_WAIT_S_MAX),
            wait=wait_random_exponential(multiplier=0.05, max=2),
            retry=retry_if_exception_type((BusUnavailable, nats.errors.Error, TimeoutError)),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._send_once(subject, data, headers, refusal)
        except (nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"{subject} was not acknowledged: {error!r}") from error
        raise AssertionError("unreachable")

    async def _send_once(
        self,
        subject: str,
        data: bytes,
        headers: dict[str, str],
        refusal: Literal["fenced", "expected_sequence"],
    ) -> int:
        try:
            ack = await self._js.publish(subject, data, headers=headers)
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                raise PublishRefused(refusal, f"{subject}: {error.description}") from error
            if error.code == 503:  # full, no leader, out of resources: all pass
                raise BusUnavailable(f"{subject}: {error.description}") from error
            raise BusError(f"{subject}: {error.description}") from error
        except nats.js.errors.NoStreamResponseError as error:
            raise BusUnavailable(f"{subject}: no stream answers") from error
        return int(ack.seq)

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
        return await self.publish_raw(subjects.fence(worker), b"", {"ce-source": source})

    async def dead_letter(self, message: Message, consumer: str, error: str) -> None:
        """Put a message aside for people, with its error, bytes and headers."""
        kept = {f"dead-{k}": v for k, v in message.headers.items() if not k.startswith("Nats-")}
        text = error.encode("ascii", "backslashreplace").decode().replace("\n", " ")[:2000]
        headers = {
            **kept,
            "dead-error": text,
            "dead-subject": message.subject,
            "dead-sequence": str(message.sequence),
            "Nats-Msg-Id": f"dead.{consumer}.{message.sequence}",
        }
        subject = subjects.dead_letter(consumer)
        try:
            await self.publish_raw(subject, message.data, headers)
        except TooLarge:  # the bytes fitted once, without the error
            room = self.max_payload_bytes // 2
            await self.publish_raw(subject, message.data[:room], {**headers, "dead-cut": "1"})

    # -- consuming -----------------------------------------------------------------------------

    async def consumer(
        self,
        name: str,
        filters: list[str],
        *,
        start_sequence: int | None = None,
        ack_wait_s: float = ACK_WAIT_S,
        max_ack_pending: int = 10_000,
        ack: Literal["explicit", "all", "none"] = "explicit",
        inactive_s: float | None = None,
    ) -> Consumer:
        """Bind to a durable consumer, made if need be, compared field by field if it exists.

        Args:
            start_sequence: where a new one begins; None: at the first message there is.
            inactive_s: the server removes it after this long without a client (lanes: a lane dies
                with its worker).

        Raises:
            BusError: an existing one differs in a setting that cannot be changed.
        """
        config = api.ConsumerConfig(
            durable_name=name,
            filter_subjects=filters,
            ack_policy=api.AckPolicy(ack),
            ack_wait=ack_wait_s if ack != "none" else None,
            max_ack_pending=max_ack_pending if ack != "none" else None,
            deliver_policy=(
                api.DeliverPolicy.ALL
                if start_sequence is None
                else api.DeliverPolicy.BY_START_SEQUENCE
            ),
            opt_start_seq=start_sequence,
            inactive_threshold=inactive_s,
        )
        try:
            live = await self._js.consumer_info(subjects.STREAM, name)
        except nats.js.errors.NotFoundError:
            live = await self._js.add_consumer(subjects.STREAM, config)
        else:
            if _differs(live.config, config):
                # Where it starts was settled when it was made; only the rest can be mended.
                config.deliver_policy = live.config.deliver_policy
                config.opt_start_seq = live.config.opt_start_seq
                try:
                    live = await self._js.add_consumer(subjects.STREAM, config)
                except nats.js.errors.APIError as error:
                    raise BusError(
                        f"consumer {name} exists with other settings: {error.description}"
                    ) from error
        sub = await self._js.pull_subscribe_bind(name, subjects.STREAM)
        return Consumer(self._js, sub, name)

    async def delete_consumer(self, name: str) -> None:
        """Remove a durable; nothing happens if it is not there."""
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await self._js.delete_consumer(subjects.STREAM, name)

    async def consumers(self) -> list[ConsumerState]:
        """Where every durable of the stream stands."""
        found: list[ConsumerState] = []
        while True:
            page = await self._js.consumers_info(subjects.STREAM, offset=len(found))
            found += [_consumer_state(info) for info in page]
            if len(page) < 256:
                return found

    async def listen(
        self, subject: str, callback: Callable[[Mapping[str, str], bytes], Awaitable[None]]
    ) -> None:
        """Hear transient messages (heartbeats)."""

        async def on_message(raw: Msg) -> None:
            await callback(raw.headers or {}, raw.data)

        await self._nc.subscribe(subject, cb=on_message)

    async def lease(self, key: str, holder: str, ttl_s: float) -> Lease:
        """A lease on `key` that runs out `ttl_s` after its last renewal."""
        bucket = f"dsec_lease_{key}"
        try:
            kv = await self._js.create_key_value(
                api.KeyValueConfig(bucket=bucket, ttl=ttl_s, history=1)
            )
        except nats.js.errors.BadRequestError:
            kv = await self._js.key_value(bucket)
        return Lease(kv, "holder", holder)


def _differs(live: api.ConsumerConfig, wanted: api.ConsumerConfig) -> bool:
    live_filters = live.filter_subjects or ([live.filter_subject] if live.filter_subject else [])
    return (
        sorted(live_filters) != sorted(wanted.filter_subjects or [])
        or live.ack_policy != wanted.ack_policy
        or (wanted.ack_wait is not None and live.ack_wait != wanted.ack_wait)
        or (wanted.max_ack_pending is not None and live.max_ack_pending != wanted.max_ack_pending)
    )


def _without_secret(url: str) -> str:
    """A URL as it may be shown: without user and password."""
    scheme, separator, rest = url.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2]
