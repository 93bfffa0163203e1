"""A connection to the bus: what a service holds, and what everything else here is reached by."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Literal, Self

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import api

from dsec.platform.bus import consumer as consumers
from dsec.platform.bus.bucket import Bucket
from dsec.platform.bus.client import BusClient
from dsec.platform.bus.consumer import ACK_WAIT_S, Consumer, ConsumerState
from dsec.platform.bus.errors import BusUnavailable
from dsec.platform.bus.lease import Lease
from dsec.platform.bus.publisher import Publisher
from dsec.platform.bus.refusals import GuardedClient
from dsec.platform.bus.retry import AWAY, CONNECTING, Retry
from dsec.platform.bus.stream import NoStream, Stream, StreamOptions, StreamState
from dsec.platform.roles import inbox_prefix
from dsec_contracts import subjects

SUBSCRIBE_WAIT_S = 2
CLOSE_WAIT_S_MAX = 2.0


class Bus(Publisher):
    """A connection to the bus."""

    def __init__(self, nc: GuardedClient, name: str) -> None:
        super().__init__(nc)
        self._guarded = nc
        self._stream = Stream(nc, self._js)
        self.name = name

    @classmethod
    async def connect(cls, url: str, name: str, patience: Retry | None = None) -> Self:
        """Connect, and stay connected: the client reconnects for ever, to any node of a cluster.

        Args:
            url: of a server, or of several nodes of a cluster, separated by commas.
            patience: how long it is waited for the first connection; None: as `CONNECTING` says.

        Raises:
            BusUnavailable: no server for so long.
        """
        patience = patience or CONNECTING
        # Otherwise everybody would be at the node that is named first.
        urls = nodes(url)
        urls = random.SystemRandom().sample(urls, len(urls))
        try:
            # The client that reconnects for ever also connects for ever, the first time.
            async with asyncio.timeout(patience.wait_s_max):
                async for attempt in patience.attempts():
                    with attempt:
                        nc = BusClient()
                        await nc.connect(
                            urls,
                            name=name,
                            error_cb=nc.on_error,
                            inbox_prefix=inbox_prefix(url),
                            allow_reconnect=True,
                            max_reconnect_attempts=-1,
                            reconnect_time_wait=0.2,  # type: ignore[arg-type]
                            connect_timeout=2,
                        )
        except (OSError, nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(
                f"no NATS server answers at {_without_secret(url)} within "
                f"{patience.wait_s_max:.0f} s ({error!r}): "
                "is it running, and is DSEC_NATS_URL right?"
            ) from error
        return cls(nc, name)

    async def close(self) -> None:
        """Flush and close."""
        # What must arrive was acknowledged; a server that is away keeps nobody from leaving.
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            await asyncio.wait_for(self._nc.flush(), CLOSE_WAIT_S_MAX)
        await self._nc.close()

    @property
    def connected(self) -> bool:
        """Whether a server is connected now."""
        return bool(self._nc.is_connected)

    # -- the stream ----------------------------------------------------------------------------

    async def ensure_stream(self, options: StreamOptions | None = None) -> None:
        """Make the stream, or bring the live one to our settings, field by field.

        A cluster that has just started cannot yet: it is asked again.

        Raises:
            BusUnavailable: it cannot for as long as `CONNECTING` waits.
            BusError: a setting that cannot be changed differs.
        """
        await self._stream.ensure(options or StreamOptions())

    async def await_stream(self) -> None:
        """Wait until somebody who may has made the stream.

        Raises:
            BusError: nobody has for as long as `CONNECTING` waits.
        """
        try:
            async for attempt in CONNECTING.attempts(NoStream):
                with attempt:
                    await self._stream.state()
        except AWAY as error:
            raise BusUnavailable(f"the stream cannot be asked for: {error!r}") from error

    async def stream_state(self) -> StreamState:
        """What the stream holds."""
        return await self._stream.state()

    async def counts(self, subject_filter: str) -> dict[str, int]:
        """How many messages the stream has on each subject of a filter that names few."""
        return await self._stream.counts(subject_filter)

    async def message_time(self, sequence: int) -> datetime | None:
        """When the message at a sequence came in, whatever its subject; None: there is none."""
        return await self._stream.message_time(sequence)

    async def last_sequence(self, subject: str) -> int:
        """The sequence of the last message on a subject; 0 if there is none."""
        return await self._stream.last_sequence(subject)

    async def purge(self, subject_filter: str, before_sequence: int) -> None:
        """Remove the messages of a subject filter that lie before a sequence."""
        await self._stream.purge(subject_filter, before_sequence)

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
        # A single subject stands in the subject of the call too, where permissions can name it.
        [single], several = (filters, None) if len(filters) == 1 else ([None], filters)
        config = api.ConsumerConfig(
            name=name,
            durable_name=name,
            filter_subject=single,
            filter_subjects=several,
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
        async for attempt in CONNECTING.attempts():  # a cluster may just elect its leader
            with attempt:
                return await consumers.bind(self._js, name, config)
        raise AssertionError("unreachable")

    async def delete_consumer(self, name: str) -> None:
        """Remove a durable; nothing happens if it is not there."""
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await self._js.delete_consumer(subjects.STREAM, name)

    async def consumers(self) -> list[ConsumerState]:
        """Where every durable of the stream stands."""
        return await consumers.states(self._js)

    async def listen(
        self, subject: str, callback: Callable[[Mapping[str, str], bytes], Awaitable[None]]
    ) -> None:
        """Hear transient messages (heartbeats).

        Raises:
            NotPermitted: the server does not let this user.
        """

        async def on_message(raw: Msg) -> None:
            await callback(raw.headers or {}, raw.data)

        await self._nc.subscribe(subject, cb=on_message)
        with contextlib.suppress(*AWAY):  # refused or not: it is subscribed to on every connection
            await self._guarded.heard_out(SUBSCRIBE_WAIT_S)
        self._guarded.raise_if_refused(subject)

    async def lease(self, key: str, holder: str, ttl_s: float) -> Lease:
        """A lease on `key` that runs out `ttl_s` after its last renewal. Kept on as many nodes as
        the stream, for which it waits."""
        await self.await_stream()
        replicas = (await self._stream.state()).replicas
        async for attempt in CONNECTING.attempts():
            with attempt:
                return await Lease.open(self._js, key, holder, ttl_s, replicas)
        raise AssertionError("unreachable")

    async def bucket(self, name: str) -> Bucket:
        """A key-value bucket, made if need be. Kept on as many nodes as the stream, for which it
        waits."""
        await self.await_stream()
        replicas = (await self._stream.state()).replicas
        async for attempt in CONNECTING.attempts():
            with attempt:
                return await Bucket.open(self._js, name, replicas)
        raise AssertionError("unreachable")

    async def existing_bucket(self, name: str) -> Bucket | None:
        """A key-value bucket, for reading; None: nobody has made it."""
        return await Bucket.existing(self._js, name)


def nodes(url: str) -> list[str]:
    """The URLs of a setting that may name several, separated by commas."""
    return [one for part in url.split(",") if (one := part.strip())]


def _without_secret(url: str) -> str:
    """A URL, or several, as they may be shown: without user and password."""

    def shown(one: str) -> str:
        scheme, separator, rest = one.rpartition("://")
        return scheme + separator + rest.rpartition("@")[2]

    return ", ".join(map(shown, nodes(url)))
