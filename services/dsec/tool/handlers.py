"""What becomes of a turn: each of its calls is answered, then the turn is acknowledged.

A message may come again: to another replica, when the one that had it died, or because its lane
heard no answer. Three rules follow.

* A call that is answered is not made again. The answer of the log is sent to the lane once more.
* A call that may be made again (`idempotent`) is, under the same idempotency key.
* Of any other call it has to be known whether somebody began it. That this message was delivered
  before does not say so: it may have waited in a replica that died. So before such a call a
  `tool.begun` is published, on a subject of the call's own and only if that subject is empty: of
  several replicas one wins, and whoever comes later finds it in the stream or, once that is
  trimmed, in the log. Without an answer, and once its deadline is over, the call is
  `outcome_unknown`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial

from dsec.platform.bus import (
    Bus,
    Later,
    Message,
    Settler,
    TooLarge,
)
from dsec.platform.objects import ObjectStore, put_patiently
from dsec.platform.roles import TOOLS_BUCKET
from dsec.platform.telemetry import OFF, Telemetry, metrics
from dsec.platform.telemetry.metrics import Metric
from dsec.session.stored_results import INLINE_BYTES_MAX
from dsec.tool.asked import Asked, asked_by
from dsec.tool.effects import Memory, Past, Tool, Tools
from dsec.tool.frames import Failure, Outcome, Refused
from dsec.tool.making import Maker
from dsec.tool.processes import Processes
from dsec.tool.quotas import CODE as QUOTA
from dsec.tool.quotas import Quotas, used_up
from dsec.tool.settings import ToolSettings
from dsec.tool.spans import call_span
from dsec.tool.telling import Teller
from dsec.tool.under_way import SessionOver, UnderWay

log = logging.getLogger(__name__)

CONSUMER = "tool"


class Caller:
    """Makes the calls of turns, several turns at a time."""

    def __init__(
        self,
        bus: Bus,
        tools: Tools,
        past: Memory,
        processes: Processes,
        settings: ToolSettings,
        now: Callable[[], datetime],
        objects: ObjectStore | None = None,
        telemetry: Telemetry = OFF,
    ) -> None:
        self._tools = tools
        self._past = past
        self._objects = objects
        self._settings = settings
        self._now = now
        self._settler = Settler(
            bus,
            CONSUMER,
            self._work,
            ack_wait_s=settings.tool_ack_wait_s,
            retry_s_min=settings.tool_retry_s_min,
            retry_s_max=settings.tool_retry_s_max,
            in_flight_max=settings.tool_turns_in_flight_max,
        )
        self._sure_s = settings.tool_ack_wait_s / 2
        """For so long a turn is this replica's alone: half before it is looked at, half after."""
        self._calls = asyncio.Semaphore(settings.tool_calls_in_flight_max)
        shared = partial(bus.bucket, TOOLS_BUCKET)
        self._quotas = Quotas(shared, settings.tool_replica, lambda: now().timestamp())
        self._under_way = UnderWay()
        self._teller = Teller(bus, settings.tool_replica, settings.tool_retry_s_min, now)
        self._at_work: set[str] = set()
        self._telemetry = telemetry
        self._counts: Counter[Metric] = Counter()
        self._maker = Maker(processes, self._quotas, self._teller, past, settings, self._counts)
        for metric in (metrics.TOOL_CALLS, metrics.TOOL_CALLS_FAILED, metrics.TOOL_RETRIES):
            telemetry.counter(metric, partial(self._counts.__getitem__, metric))
        telemetry.gauge(metrics.TOOL_FAILURE_RATE, self._failure_rate)
        telemetry.counter(metrics.DEAD_LETTERS, lambda: self._settler.dead_letters)

    def _failure_rate(self) -> float | None:
        calls = self._counts[metrics.TOOL_CALLS]
        return self._counts[metrics.TOOL_CALLS_FAILED] / calls if calls else None

    async def on_tool_called(self, message: Message) -> None:
        """Begin to work on a turn; never raises. Waits only while there are too many."""
        await self._settler.begin(message)

    async def close(self, wait_s: float) -> None:
        """Take no more turns, and give those at hand their time."""
        await self._settler.close(wait_s)
        self._quotas.close()

    async def on_session_ended(self, headers: Mapping[str, str], body: bytes) -> None:
        """Stop what is under way for a session that has ended."""
        await self._under_way.on_session_ended(headers, body)

    async def _work(self, message: Message) -> None:
        # Not a task group: the trouble of one call must not stop another in its midst.
        answers = map(self._answer, asked_by(message, self._now(), self._sure_s))
        found = await asyncio.gather(*answers, return_exceptions=True)
        errors = [error for error in found if isinstance(error, Exception)]
        if errors:
            raise errors[0]

    # -- calls ---------------------------------------------------------------------------------

    async def _answer(self, asked: Asked) -> None:
        """See that a call is answered, unless this replica is at it already."""
        if asked.key in self._at_work:
            return  # the lane asks again, and hears the answer to what it asked first
        self._at_work.add(asked.key)
        looked_s = asyncio.get_running_loop().time()
        try:
            past = Past(None, None)
            if asked.maybe_made:
                past = await self._past(asked.session_id, asked.step, asked.turn, asked.index)
            if past.answer is not None:
                await self._teller.answer_again(asked, past.answer)
                return
            began, begun_s = self._now(), asyncio.get_running_loop().time()
            tool = await self._tool(asked)
            try:
                answer = self._outcome(asked, tool, past, looked_s)
                outcome, attempts = await self._under_way.run(asked.session_id, answer)
            except SessionOver:
                outcome, attempts = self._stopped(asked), 0
            seconds = asyncio.get_running_loop().time() - begun_s
            blob = await self._stored(outcome)
            told = self._teller.circumstance(asked, seconds=round(seconds, 6), attempts=attempts)
            try:
                await self._teller.answer(asked, outcome, told, blob)
            except TooLarge as error:
                why = f"{error}; with DSEC_OBJECT_STORE_URL it would travel through the store"
                outcome = Failure("output_too_large", why)
                await self._teller.answer(asked, outcome, told)
            self._counts[metrics.TOOL_CALLS] += 1
            self._counts[metrics.TOOL_CALLS_FAILED] += isinstance(outcome, Failure)
            if self._telemetry.keeps(asked.session_id.int):
                document = tool.document if isinstance(tool, Tool) else None
                span = call_span(asked, document, outcome, (began, self._now()), told)
                self._telemetry.emit(span)
        finally:
            self._at_work.discard(asked.key)
            self._maker.begun.discard(asked.key)

    async def _tool(self, asked: Asked) -> Tool | Failure:
        if asked.use is None:
            return Failure("spec_not_found", f"the call names no spec for {asked.name}")
        return await self._tools.get(asked.use.spec, asked.sequence)

    async def _outcome(
        self, asked: Asked, tool: Tool | Failure, past: Past, looked_s: float
    ) -> tuple[Outcome, int]:
        """What came of a call, and how often it was made for that.

        Args:
            looked_s: when its past was looked at, on the loop's clock.
        """
        if isinstance(tool, Failure):
            return tool, 0
        assert asked.use is not None
        document = tool.document
        if not document.idempotent and past.begun_at is not None:
            return self._unknown(past.begun_at, asked.use.deadline_s), 0
        over = used_up(document.quota, asked.name, asked.number, asked.total, asked.total_max)
        if over is not None:
            return Failure(QUOTA, over), 0
        loop = asyncio.get_running_loop()
        until_s = loop.time() + asked.use.deadline_s
        try:
            async with self._quotas.place(asked.use.spec, document.quota, until_s):
                left_s = until_s - loop.time()
                # To wait for this replica is no part of the deadline: that is not the tool's doing.
                async with self._calls:
                    return await self._maker.made(asked, tool, left_s, looked_s)
        except Refused as refused:
            return refused.failure, 0

    def _unknown(self, begun_at: datetime, deadline_s: float) -> Failure:
        """The outcome of a call that somebody began and did not answer.

        Raises:
            Later: whoever began it may be at it still.
        """
        passed_s = (self._now() - begun_at).total_seconds()
        left_s = deadline_s + self._settings.tool_unknown_grace_s - passed_s
        if left_s > 0:
            raise Later(left_s, "another replica has begun it")
        return Failure(
            "outcome_unknown",
            "the call was begun and nobody knows how it ended; the tool is not `idempotent`, so it "
            "was not made again",
        )

    def _stopped(self, asked: Asked) -> Failure:
        """What is recorded of a call whose session ended. Nobody hears it."""
        how = "it was not made"
        if asked.key in self._maker.begun:
            how = "it was stopped in its midst, and how far it came is not known"
        elif asked.maybe_made:
            how = "it was not made here, and whether it was elsewhere is not known"
        return Failure("session_ended", f"the session ended before the call did: {how}")

    async def _stored(self, outcome: Outcome) -> str | None:
        """The name of a large result, once it lies in the object store; None: it travels itself.

        Raises:
            ObjectStoreError: the store was away for long.
        """
        if isinstance(outcome, Failure) or len(outcome) <= INLINE_BYTES_MAX:
            return None
        if self._objects is None:
            return None
        return await put_patiently(self._objects, outcome)
