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

from dsec.platform.bus.errors import BusError, BusUnavailable
from dsec.platform.bus.message import time_of
from dsec.platform.bus.retry import CONNECTING
from dsec_contracts import subjects

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
STREAM_BYTES_MIN = 64 << 20
DUPLICATE_WINDOW_S = 120

_REQUIRED = ("subjects", "retention", "storage", "discard", "duplicate_window", "allow_direct")
OTHER_CONFIGURATION = 10058
_UNAVAILABLE = 503
_NO_MESSAGE = 10037
_NO_ROOM = 10047
_NO_STREAM = 10059
_NO_PEERS = 10005
_NO_CLUSTER = 10074


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How the stream is made. Compared with the live one at every start."""

    max_bytes: int = 8 << 30
    replicas: int | None = None
    """How many nodes of a cluster keep it. None: a live one stays as it is, a new one is on one."""

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
    replicas: int = 1
    leader: str = ""
    """The name of the server that decides; empty where a cluster has none now."""
    behind: tuple[str, ...] = ()
    """The names of nodes that do not have all of it yet, or are away."""


def _halved(options: StreamOptions) -> StreamOptions:
    half = options.max_bytes // 2
    if half < STREAM_BYTES_MIN:
        raise BusError(
            f"the NATS server has no room for a stream of {STREAM_BYTES_MIN >> 20} MB: free space "
            "on its disk, or raise `max_file_store` in its configuration"
        )
    log.warning("the NATS server has no room for %d MB, trying half", options.max_bytes >> 20)
    return replace(options, max_bytes=half)


def _no_room(error: nats.js.errors.APIError) -> bool:
    """Whether it is for the size that a stream is not taken."""
    storage = "insufficient storage" in (error.description or "")
    return error.err_code == _NO_ROOM or (error.err_code == _NO_PEERS and storage)


def refused(what: str, error: nats.js.errors.APIError) -> BusError:
    """An answer of the JetStream API, as what it means to whoever asked."""
    if error.err_code == _NO_CLUSTER:
        return BusError(f"{what}: DSEC_NATS_REPLICAS asks for several nodes, and there is one")
    # A cluster finds its nodes only some seconds after they started.
    if error.code == _UNAVAILABLE or error.err_code == _NO_PEERS:
        return BusUnavailable(f"{what}: {error.description}")
    return BusError(f"{what}: {error.description}")


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
        async for attempt in CONNECTING.attempts():
            with attempt:
                await self._ensure(options)

    async def _ensure(self, options: StreamOptions) -> None:
        try:
            await self._js.add_stream(options.config())
        except nats.js.errors.APIError as error:
            if error.err_code == OTHER_CONFIGURATION:
                await self._update(options)
            elif not _no_room(error):
                raise refused("the stream cannot be made", error) from error
            elif (live_bytes := await self._live_bytes()) is None:
                await self._ensure(_halved(options))
            else:
                await self._update(replace(options, max_bytes=live_bytes))

    async def _live_bytes(self) -> int | None:
        """What the stream may grow to; None: there is none yet."""
        try:
            return (await self.state()).max_bytes
        except NoStream:
            return None

    async def _update(self, options: StreamOptions) -> None:
        live = await self.state()
        if options.replicas is None:
            options = replace(options, replicas=live.replicas)
        try:
            await self._js.update_stream(options.config())
        except nats.js.errors.APIError as error:
            if _no_room(error) and options.max_bytes != live.max_bytes:
                await self._update(replace(options, max_bytes=live.max_bytes))  # it stays as large
                return
            told = f"stream {subjects.STREAM} exists with settings that cannot be brought to ours"
            raise refused(told, error) from error

    async def counts(self, subject_filter: str) -> dict[str, int]:
        """How many messages there are on each subject of a filter that names few."""
        raw = await self._ask("INFO", {"subjects_filter": subject_filter})
        return dict(raw["state"].get("subjects") or {})

    async def state(self) -> StreamState:
        """What the stream holds."""
        raw = await self._ask("INFO")
        state, cluster = raw["state"], raw.get("cluster", {})
        others = cluster.get("replicas", [])
        return StreamState(
            state["first_seq"],
            state["last_seq"],
            state["messages"],
            state["bytes"],
            raw["config"]["max_bytes"],
            datetime.fromisoformat(raw["created"]),
            raw["config"]["num_replicas"],
            cluster.get("leader", ""),
            tuple(one["name"] for one in others if not one["current"] or one.get("offline")),
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
            if result["error"].get("code") == _UNAVAILABLE:
                raise BusUnavailable(f"{call}: {result['error'].get('description')}")
            none = result["error"].get("err_code") == _NO_STREAM
            raise (NoStream if none else _Refused)(call, result["error"])
        return result


def _nanoseconds(rfc3339: str) -> int:
    """A server's time, such as `2026-05-04T03:02:01.123456789Z`, in nanoseconds since 1970."""
    whole, _, fraction = rfc3339.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * 1_000_000_000 + int(fraction.ljust(9, "0"))
