"""The mode of one service, shared: this replica's reports go there, and everybody's come back."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, fields, replace
from typing import Any

from dsec.platform.bus import Bucket, BusUnavailable
from dsec.platform.cancellation import cancelled
from dsec.reward.switch import Mode, Report, Standing, decide

log = logging.getLogger(__name__)

REPORT_PERIOD_S = 0.5
CONFLICTS_MAX = 8
"""Of one report; the next one comes soon."""


Tell = Callable[[Standing, float], Awaitable[None]]
"""Makes a switch known; also given the time of the report that it followed from."""


def key_of(service: str) -> str:
    """Where a service's standing lies."""
    return f"{service}.standing"


def read_standing(value: bytes) -> Standing:
    """A standing from the bucket; empty, or no standing: nobody has reported yet."""
    if not value:
        return Standing()
    try:
        told = json.loads(value)
        reports = {
            name: Report(**_known(Report, report)) for name, report in told["reports"].items()
        }
        return Standing(**{**_known(Standing, told), "reports": reports})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.error("what stands for a standing is none, and is not kept: %r (%s)", value[:80], error)
        return Standing()


def _known(kind: Any, told: dict[str, Any]) -> dict[str, Any]:
    """The fields that this version knows: a newer one may say more."""
    return {one.name: told[one.name] for one in fields(kind) if one.name in told}


class SharedStanding:
    """One service's, as one replica knows it."""

    def __init__(
        self,
        bucket: Bucket,
        service: str,
        replica: str,
        report: Callable[[], Report | None],
        latency_switch_ms: Callable[[], float],
        tell: Tell,
    ) -> None:
        """Prepare.

        Args:
            report: what this replica sees now; None: it has had nothing to do with the service for
                a while.
            tell: makes a switch known.
        """
        self._bucket = bucket
        self._service = service
        self._replica = replica
        self._report = report
        self._latency_switch_ms = latency_switch_ms
        self._tell = tell
        self._told_since = 0.0
        self._task: asyncio.Task[None] | None = None
        self._known = asyncio.Event()
        self._standing = Standing()

    async def mode(self) -> Mode:
        """The mode, as it was at the last report; the first time it is asked for."""
        if self._task is None or self._task.done():
            self._known.clear()
            self._task = asyncio.create_task(self._reporting())
        await self._known.wait()
        return self._standing.mode

    def close(self) -> None:
        """Report no more."""
        if self._task is not None:
            self._task.cancel()

    async def _reporting(self) -> None:
        try:
            while (report := self._report()) is not None and not cancelled():
                try:
                    await self._share(report)
                except BusUnavailable as error:
                    log.warning("the mode of %s cannot be shared: %s", self._service, error)
                self._known.set()
                await asyncio.sleep(REPORT_PERIOD_S)
        finally:
            self._known.set()  # whatever ended it: who asks must not wait for ever

    async def _share(self, report: Report) -> None:
        for _ in range(CONFLICTS_MAX):
            entry = await self._bucket.get(key_of(self._service))
            before = read_standing(entry.value)
            after = decide(before, self._replica, report, self._latency_switch_ms())
            if after.since == self._told_since:
                after = replace(after, told_since=after.since)
            value = json.dumps(asdict(after)).encode()
            if await self._bucket.change(key_of(self._service), value, entry.revision) is not None:
                switched = after.mode != before.mode
                if switched:
                    log.warning("%s is asked %s rewards now", self._service, after.mode)
                self._standing = after
                if after.is_told_by(switched, report.at):
                    await self._tell(after, report.at)
                    self._told_since = after.since
                return
            self._standing = before
