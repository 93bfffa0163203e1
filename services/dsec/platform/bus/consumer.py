"""Durable pull consumers: made or mended, read, and asked where they stand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext, api

from dsec.platform.bus.errors import BusError
from dsec.platform.bus.message import Message
from dsec.platform.bus.stream import refused
from dsec_contracts import subjects

log = logging.getLogger(__name__)

ACK_WAIT_S = 5.0
FETCH_PAUSE_S = 0.2
PAGE_CONSUMERS_MAX = 256
"""Of a list of consumers; the server's own bound."""


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
        return _state(await self._sub.consumer_info())

    async def close(self) -> None:
        """Stop receiving. The durable itself stays."""
        with contextlib.suppress(nats.errors.Error):  # the connection is gone, and this with it
            await self._sub.unsubscribe()


async def bind(js: JetStreamContext, name: str, config: api.ConsumerConfig) -> Consumer:
    """Bind to a durable consumer, made if need be, compared field by field if it exists.

    How many nodes keep it is not said: it is as many as keep the stream.

    Raises:
        BusUnavailable: it cannot be made at the moment.
        BusError: it never can, or an existing one differs in a setting that cannot be changed.
    """
    try:
        await _make(js, name, config)
    except nats.js.errors.APIError as error:
        raise refused(f"consumer {name} cannot be made", error) from error
    sub = await js.pull_subscribe_bind(name, subjects.STREAM)
    return Consumer(js, sub, name)


async def _make(js: JetStreamContext, name: str, config: api.ConsumerConfig) -> None:
    try:
        live = await js.consumer_info(subjects.STREAM, name)
    except nats.js.errors.NotFoundError:
        await js.add_consumer(subjects.STREAM, config)
    else:
        if _differs(live.config, config):
            # Where it starts was settled when it was made; only the rest can be mended.
            config.deliver_policy = live.config.deliver_policy
            config.opt_start_seq = live.config.opt_start_seq
            try:
                await js.add_consumer(subjects.STREAM, config)
            except nats.js.errors.APIError as error:
                raise refused(f"consumer {name} exists with other settings", error) from error


async def states(js: JetStreamContext) -> list[ConsumerState]:
    """Where every durable of the stream stands."""
    found: list[ConsumerState] = []
    while True:
        page = await js.consumers_info(subjects.STREAM, offset=len(found))
        found += [_state(info) for info in page]
        if len(page) < PAGE_CONSUMERS_MAX:
            return found


def _state(info: api.ConsumerInfo) -> ConsumerState:
    floor = info.ack_floor.stream_seq if info.ack_floor else 0
    delivered = info.delivered.stream_seq if info.delivered else 0
    return ConsumerState(
        info.name, info.num_pending or 0, info.num_ack_pending or 0, floor, delivered
    )


def _differs(live: api.ConsumerConfig, wanted: api.ConsumerConfig) -> bool:
    return (
        _filters(live) != _filters(wanted)
        or live.ack_policy != wanted.ack_policy
        or (live.inactive_threshold or 0) != (wanted.inactive_threshold or 0)
        or (wanted.ack_wait is not None and live.ack_wait != wanted.ack_wait)
        or (wanted.max_ack_pending is not None and live.max_ack_pending != wanted.max_ack_pending)
    )


def _filters(config: api.ConsumerConfig) -> list[str]:
    single = [config.filter_subject] if config.filter_subject else []
    return sorted(config.filter_subjects or single)
