"""Heartbeats, and until when there were none but those that were heard.

A worker that nobody heard for a while counts as dead, so it must be known that whoever could have
been heard was: heartbeats may lie in the server's buffers or in ours while this process, or the
machine, is busy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from dsec.platform.bounded import Bounded
from dsec.platform.bus import Bus, BusError
from dsec.platform.bus.retry import AWAY
from dsec.platform.cancellation import cancelled
from dsec.scheduler.fold import hear
from dsec.scheduler.intake import read_heartbeat
from dsec.scheduler.state import SchedulerState
from dsec_contracts import WorkerHeartbeat, subjects

HEARTBEATS = subjects.every(WorkerHeartbeat.event_name())
HEARD_PERIOD_S = 0.25
PERIODS_TOLD_MAX = 10_000
"""Of nodes whose workers beat otherwise than expected: so many are remembered to have been told."""

log = logging.getLogger(__name__)


class Listening:
    """Hears the workers."""

    def __init__(
        self,
        bus: Bus,
        state: SchedulerState,
        monotonic: Callable[[], float],
        on_heard: Callable[[], None],
        *,
        period_s: float,
    ) -> None:
        """Nothing is heard yet.

        Args:
            period_s: how often workers are expected to beat.
        """
        self._bus = bus
        self._state = state
        self._monotonic = monotonic
        self._on_heard = on_heard
        self._period_s = period_s
        self._said: Bounded[tuple[str, float], None] = Bounded(PERIODS_TOLD_MAX)

    async def begin(self) -> None:
        """Hear heartbeats from now on."""
        self._state.heard_until_s = self._monotonic()
        await self._bus.listen(HEARTBEATS, self.on_worker_heartbeat)

    async def on_worker_heartbeat(self, headers: Mapping[str, str], data: bytes) -> None:
        """Take a heartbeat into the state. One that is malformed is passed over: another comes."""
        heartbeat = read_heartbeat(headers, data)
        if heartbeat is not None:
            hear(self._state, heartbeat, self._monotonic())
            self._compare(heartbeat)
            self._on_heard()

    def _compare(self, heartbeat: WorkerHeartbeat) -> None:
        """Say so, once for a node, where its workers beat otherwise than is expected here. They are
        waited for accordingly: the settings are at fault, and not they."""
        node, period_s = heartbeat.fact.node, heartbeat.circumstance.period_s
        if period_s is None or period_s == self._period_s or (node, period_s) in self._said:
            return
        self._said.remember((node, period_s), None)
        log.warning(
            "worker %s on %s says that it is alive every %g s, and %g s are expected: set "
            "DSEC_HEARTBEAT_PERIOD_S there and heartbeat_period_s here to the same",
            heartbeat.fact.worker,
            node,
            period_s,
            self._period_s,
        )

    async def hear_out(self) -> None:
        """Know until when heartbeats were heard; for ever. While the bus does not say, nobody is
        silent for longer: it says so once."""
        told = False
        while not cancelled():
            asked_s = self._monotonic()
            try:
                await self._bus.stream_state()  # its answer comes behind what was there before it
                await asyncio.sleep(0)  # which is heard in a task of its own
                self._state.heard_until_s = asked_s
                told = False
            except (*AWAY, BusError) as error:
                if not told:
                    log.warning("no worker is taken for dead while the bus is not heard: %r", error)
                told = True
            await asyncio.sleep(HEARD_PERIOD_S)
