"""Who writes, and from where: take over, go on from the floor, and start again when anything fails.

Whatever goes wrong with the database or the bus ends a leadership, and the next one starts from
what the log says. Nothing is acknowledged before it is committed, so nothing has to be saved on
the way out, and being killed is the same as being stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from dsec.platform.bus import Bus, BusError, StreamOptions
from dsec.platform.telemetry import OFF, Telemetry
from dsec.recorder.connection import connect
from dsec.recorder.counters import Counters
from dsec.recorder.effects import DeliveryGap, Feed, StreamSetBack, settle_epoch
from dsec.recorder.handlers import PARTITION_CHECK_S, Appender
from dsec.recorder.live import Live
from dsec.recorder.settings import RecorderSettings
from dsec.recorder.trim import Trimmer
from dsec.recorder.writer import Floor, Writer

log = logging.getLogger(__name__)

RETRY_WAIT_S_MIN = 0.1


@dataclass(slots=True)
class Recorder:
    """One recorder. Of several, one writes and the others stand by."""

    bus: Bus
    settings: RecorderSettings
    now: Callable[[], datetime]
    counters: Counters = field(default_factory=Counters)
    telemetry: Telemetry = OFF
    leading: bool = False
    open_writer: Callable[[str], Awaitable[Writer]] = Writer.connect
    """Connects the writer, from the URL of the database."""
    open_beside: Callable[[str, str], Awaitable[psycopg.AsyncConnection[Any]]] = connect
    """Connects what is beside it, from the same URL and a name."""
    _epoch: int = 0
    _epoch_set_back: int = 0
    """The epoch whose stream was found to have lost what the log has of it."""

    async def run(self, stop: asyncio.Event) -> None:
        """Record until `stop` is set: the batch in hand is finished, and that is all."""
        self.counters.tell(self.telemetry)
        live = Live(self.settings, self.now)
        await live.listen(self.bus)
        while not stop.is_set():
            # Waits grow from failure to failure, and start small again after one that got on.
            retrying = AsyncRetrying(
                retry=retry_if_exception_type(Exception),
                wait=wait_random_exponential(
                    multiplier=RETRY_WAIT_S_MIN,
                    min=RETRY_WAIT_S_MIN,
                    max=self.settings.retry_wait_s_max,
                ),
                stop=lambda _: stop.is_set(),
                sleep=_pause(stop),
                before_sleep=_log_failure,
                retry_error_callback=_log_failure,
            )
            await retrying(self._lead, live, stop)

    async def _lead(self, live: Live, stop: asyncio.Event) -> None:
        """Stand by for the lock, then record until stopped or something fails."""
        before = self.counters.batches
        writer = await self.open_writer(self.settings.database_url)
        try:
            if await self._locked(writer, stop):
                self.counters.leaderships += 1
                self.leading = True
                await self._record(writer, live, stop)
        except Exception as error:
            if isinstance(error, StreamSetBack):
                self._epoch_set_back = self._epoch
            if self.counters.batches == before:
                raise
            log.warning("recording stopped, going on from the floor: %r", error)
        finally:
            self.leading = False
            await writer.close()

    async def _locked(self, writer: Writer, stop: asyncio.Event) -> bool:
        standing_by = False
        while not stop.is_set():
            if await writer.try_lock():
                return True
            if not standing_by:
                log.info("another recorder writes; standing by")
                standing_by = True
            await _pause(stop)(self.settings.standby_poll_s)
        return False

    async def _record(self, writer: Writer, live: Live, stop: asyncio.Event) -> None:
        await self.bus.ensure_stream(StreamOptions(replicas=self.settings.nats_replicas))
        floor = await self._settle(writer)
        appender = Appender(
            writer,
            self.bus,
            floor.epoch,
            self.settings,
            self.now,
            self.counters,
            self.telemetry,
        )
        await appender.keep_partitions()
        await appender.unpark()
        # Connected before the tasks that use it: cancelled while it connects, a client leaves the
        # server waiting for the rest of the greeting.
        url = self.settings.database_url
        async with await self.open_beside(url, "dsec-recorder-beside") as beside:
            feed = await Feed.open(self.bus, floor, self.settings)
            trimmer = Trimmer(self.bus, self.settings, self.now, floor.epoch, floor.sequence)
            tasks = [
                asyncio.create_task(live.write_for_ever(beside)),
                asyncio.create_task(trimmer.trim_for_ever(beside)),
            ]
            log.info("recording from %d of epoch %d", floor.sequence, floor.epoch)
            try:
                await self._append_all(feed, appender, trimmer, tasks, stop)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await feed.close()

    async def _settle(self, writer: Writer) -> Floor:
        known = await writer.floor()
        set_back = known is not None and known.epoch == self._epoch_set_back
        floor, new = await settle_epoch(self.bus, known, set_back=set_back)
        if new:
            await writer.start_epoch(floor)
            log.warning("epoch %d begins: a stream of %s", floor.epoch, floor.stream_created)
        self._epoch = floor.epoch
        return floor

    async def _append_all(
        self,
        feed: Feed,
        appender: Appender,
        trimmer: Trimmer,
        beside: list[asyncio.Task[None]],
        stop: asyncio.Event,
    ) -> None:
        loop = asyncio.get_running_loop()
        checked_at = loop.time()
        due_at = 0.0
        while not stop.is_set():
            # Under load batches grow, and what a commit costs is shared by more rows; what comes
            # after a pause is committed at once.
            early_s = due_at - loop.time()
            if early_s > 0:
                await asyncio.sleep(early_s)
            items = await feed.next()
            if items:
                began_at = loop.time()
                await appender.on_batch(items)
                committed_at = loop.time()
                feed.pause_s = self.settings.pause_s(committed_at - began_at)
                due_at = committed_at + feed.pause_s
                trimmer.committed = items[-1].message.sequence
            for task in beside:
                if task.done():
                    task.result()  # they end only by failing
            if loop.time() - checked_at > PARTITION_CHECK_S:
                checked_at = loop.time()
                await appender.keep_partitions()


def _pause(stop: asyncio.Event) -> Callable[[float], Awaitable[None]]:
    """A sleep that ends when `stop` is set."""

    async def pause(seconds: float) -> None:
        waiter = asyncio.ensure_future(stop.wait())
        await asyncio.wait([waiter], timeout=seconds)
        waiter.cancel()

    return pause


def _log_failure(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    # What the servers say is plain enough; anything else is a fault that wants its place.
    plain = isinstance(error, psycopg.Error | BusError | StreamSetBack | DeliveryGap | OSError)
    log.warning(
        "cannot record (attempt %d): %r",
        state.attempt_number,
        error,
        exc_info=None if plain else error,
    )
