"""The stream: made or mended, trimmed, and asked what it holds."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import nats.js.errors
from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext, api

from dsec.platform.bus.errors import BusError
from dsec.platform.bus.message import time_of
from dsec_contracts import subjects

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
STREAM_BYTES_MIN = 64 << 20
DUPLICATE_WINDOW_S = 120

_REQUIRED = ("subjects", "retention", "storage", "discard", "duplicate_window", "allow_direct")
_OTHER_CONFIGURATION = 10058
_NO_MESSAGE = 10037
_NO_ROOM = 10047
_NO_STREAM = 10059


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How the stream is made. Compared with the live one at every start."""

    max_bytes: int = 8 << 30
    replicas: int = 1

    def config(self) -> api.StreamConfig:
        """The whole configuration, as it is asked for."""
        return api.StreamConfig(
            name=subjects.STREAM,
            subjects=subjects.STREAM_SUBJECTS,
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_bytes=self.max_bytes,
            num_replicas=self.replicas,
            duplicate_window=DUPLICATE_WINDOW_S,
            allow_direct=True,
        )

    def required(self) -> dict[str, Any]:
        """The settings that every stream of ours has, under the names and in the values that the
        server gives; how large it may grow and how often it is kept is the operator's."""
        asked = json.loads(json.dumps(self.config().as_dict()))
        return {name: asked[name] for name in _REQUIRED}


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the stream holds."""

    first_sequence: int
    last_sequence: int
    messages: int
    bytes: int
    max_bytes: int
    created: datetime


def _halved(options: StreamOptions) -> StreamOptions:
    half = options.max_bytes // 2
    if half < STREAM_BYTES_MIN:
        raise BusError(
            f"the NATS server has no room for a stream of {STREAM_BYTES_MIN >> 20} MB: free space "
            "on its disk, or raise `max_file_store` in its configuration"
        )
    log.warning("the NATS server has no room for %d MB, trying half", options.max_bytes >> 20)
    return replace(options, max_bytes=half)


class _Refused(BusError):
    def __init__(self, call: str, error: dict[str, Any]) -> None:
        super().__init__(f"{call}: {error.get('description')}")
        self.code = error.get("err_code")


class NoStream(_Refused):
    """It was not made yet."""

    def __init__(self, call: str, error: dict[str, Any]) -> None:
        super().__init__(call, error)
        self.args = (
            f"the NATS server has no stream {subjects.STREAM}: the recorder and `dsec up` make it",
        )


class Stream:
    """The one stream, through a connection."""

    def __init__(self, nc: NatsClient, js: JetStreamContext) -> None:
        self._nc = nc
        self._js = js

    async def ensure(self, options: StreamOptions) -> None:
        """Make the stream, or bring the live one to our settings, field by field.

        A server reserves what a stream may grow to. One that has less room gets a stream of half
        the size, or of half of that.

        Raises:
            BusError: a setting that cannot be changed differs, or there is no room at all.
        """
        try:
            await self._js.add_stream(options.config())
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _OTHER_CONFIGURATION:
                raise BusError(f"the stream cannot be made: {error.description}") from error
            await self._update(options)
        except nats.js.errors.APIError as error:
            if error.err_code != _NO_ROOM:
                raise BusError(f"the stream cannot be made: {error.description}") from error
            if (live_bytes := await self._live_bytes()) is None:
                await self.ensure(_halved(options))
            else:
                await self._update(replace(options, max_bytes=live_bytes))

    async def _live_bytes(self) -> int | None:
        """What the stream may grow to; None: there is none yet."""
        try:
            return (await self.state()).max_bytes
        except NoStream:
            return None

    async def _update(self, options: StreamOptions) -> None:
        try:
            await self._js.update_stream(options.config())
        except nats.js.errors.APIError as refused:
            live = await self.state()
            if refused.err_code == _NO_ROOM and options.max_bytes != live.max_bytes:
                await self._update(replace(options, max_bytes=live.max_bytes))  # it stays as large
                return
            raise BusError(
                f"stream {subjects.STREAM} exists with settings that cannot be brought to "
                f"ours: {refused.description}"
            ) from refused

    async def state(self) -> StreamState:
        """What the stream holds."""
        raw = await self._ask("INFO")
        state = raw["state"]
        return StreamState(
            state["first_seq"],
            state["last_seq"],
            state["messages"],
            state["bytes"],
            raw["config"]["max_bytes"],
            datetime.fromisoformat(raw["created"]),
        )

    async def message_time(self, sequence: int) -> datetime | None:
        """When the message at a sequence came in, whatever its subject; None: there is none."""
        # Of the leader, not the faster direct get: a replica that lags would say "none".
        try:
            raw = await self._ask("MSG.GET", {"seq": sequence})
        except _Refused as refused:
            if refused.code == _NO_MESSAGE:
                return None
            raise
        return time_of(_nanoseconds(raw["message"]["time"]))

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

    async def _ask(self, call: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        # The client's own methods read times to the microsecond at most, by cutting.
        data = json.dumps(body).encode() if body else b""
        subject = f"$JS.API.STREAM.{call}.{subjects.STREAM}"
        reply = await self._nc.request(subject, data, timeout=REQUEST_TIMEOUT_S)
        result: dict[str, Any] = json.loads(reply.data)
        if "error" in result:
            none = result["error"].get("err_code") == _NO_STREAM
            raise (NoStream if none else _Refused)(call, result["error"])
        return result


def _nanoseconds(rfc3339: str) -> int:
    """A server's time, such as `2026-05-04T03:02:01.123456789Z`, in nanoseconds since 1970."""
    whole, _, fraction = rfc3339.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * 1_000_000_000 + int(fraction.ljust(9, "0"))
