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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dsec.platform.bus import (
    BadMessage,
    Bus,
    Later,
    Message,
    PublishRefused,
    Settler,
    TooLarge,
)
from dsec.platform.bus.stream import DUPLICATE_WINDOW_S
from dsec.platform.objects import ObjectStore, put_patiently
from dsec.session.documents import ToolDocument
from dsec.session.log_row import TOOL_RETURNED, LogRow, fact_bytes, fact_map
from dsec.session.stored_results import INLINE_BYTES_MAX
from dsec.tool.effects import Memory, Past, Tool, Tools
from dsec.tool.frames import Failure, Order, Outcome
from dsec.tool.processes import Processes
from dsec.tool.settings import ToolSettings
from dsec_contracts import (
    Event,
    ToolBegun,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    keys,
    subjects,
)
from dsec_contracts.tool import (
    ToolAnswerCircumstance,
    ToolBegunFact,
    ToolFailedFact,
    ToolReturnedFact,
    ToolUse,
)

log = logging.getLogger(__name__)

CONSUMER = "tool"
SOURCE = "dsec/tool"


@dataclass(frozen=True, slots=True)
class Asked:
    """One call of a turn, with what is needed to make it and to answer it."""

    session_id: UUID
    step: int
    turn: int
    index: int
    turn_hash: bytes
    name: str
    arguments: str
    use: ToolUse | None
    lane: str
    sequence: int
    """The position of the turn in the stream."""
    delivery: str
    """This delivery of it, unlike all others."""
    maybe_made: bool
    """Whether somebody may have had this call before."""
    traceparent: str | None

    @property
    def id(self) -> str:
        """As the agent knows it."""
        return keys.call_id(self.step, self.turn, self.index)

    @property
    def key(self) -> str:
        """The idempotency key: the same for every attempt, another for every call there is."""
        return keys.of(self.session_id, self.id)

    def about(self) -> dict[str, Any]:
        """What every fact about the call begins with."""
        return {
            "session_id": self.session_id,
            "step": self.step,
            "turn": self.turn,
            "index": self.index,
        }


class Caller:
    """Makes the calls of turns, several turns at a time."""

    def __init__(
        self,
        bus: Bus,
        tools: Tools,
        past: Memory,
        processes: Processes,
        objects: ObjectStore | None,
        settings: ToolSettings,
        now: Callable[[], datetime],
    ) -> None:
        self._bus = bus
        self._tools = tools
        self._past = past
        self._processes = processes
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
        self._calls = asyncio.Semaphore(settings.tool_calls_in_flight_max)
        self._at_work: set[str] = set()

    async def on_tool_called(self, message: Message) -> None:
        """Begin to work on a turn; never raises. Waits only while there are too many."""
        await self._settler.begin(message)

    async def close(self, wait_s: float) -> None:
        """Take no more turns, and give those at hand their time."""
        await self._settler.close(wait_s)

    async def _work(self, message: Message) -> None:
        # Not a task group: the trouble of one call must not stop another in its midst.
        answers = map(self._answer, _read(message))
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
        try:
            past = Past(None, None)
            if asked.maybe_made:
                past = await self._past(asked.session_id, asked.step, asked.turn, asked.index)
            if past.answer is not None:
                await self._publish(self._answer_again(asked, past.answer), asked)
                return
            begun_s = asyncio.get_running_loop().time()
            outcome = await self._outcome(asked, past)
            seconds = asyncio.get_running_loop().time() - begun_s
            blob = await self._stored(outcome)
            try:
                await self._publish(self._event(asked, outcome, seconds, blob), asked)
            except TooLarge as error:
                why = f"{error}; with DSEC_OBJECT_STORE_URL it would travel through the store"
                failure = Failure("output_too_large", why)
                await self._publish(self._event(asked, failure, seconds), asked)
        finally:
            self._at_work.discard(asked.key)

    async def _outcome(self, asked: Asked, past: Past) -> Outcome:
        if asked.use is None:
            return Failure("spec_not_found", f"the call names no spec for {asked.name}")
        tool = await self._tools.get(asked.use.spec, asked.sequence)
        if isinstance(tool, Failure):
            return tool
        if not tool.document.idempotent and past.begun_at is not None:
            return self._unknown(past.begun_at, asked.use.deadline_s)
        async with self._calls:
            return await self._made(asked, tool, asked.use.deadline_s)

    async def _made(self, asked: Asked, tool: Tool, deadline_s: float) -> Outcome:
        # Before it is begun: should no process start, nothing has happened.
        process = await self._processes.take(tool.program)
        try:
            if not tool.document.idempotent:
                await self._begin(asked)
        except BaseException:
            await self._processes.give_back(process)
            raise
        order = Order(asked.arguments, asked.key)
        outcome = await self._processes.call(process, order, deadline_s)
        return _judged(outcome, tool.document)

    async def _begin(self, asked: Asked) -> None:
        """Note that a call is about to be made, if nobody did.

        Raises:
            Later: somebody did.
        """
        told = ToolAnswerCircumstance(
            lane=asked.lane, replica=self._settings.tool_replica, tool=asked.name
        )
        try:
            await self._bus.publish(
                ToolBegun(fact=ToolBegunFact(**asked.about()), circumstance=told),
                f"{asked.session_id}-{asked.id}",
                source=f"{SOURCE}/{self._settings.tool_replica}",
                time=self._now(),
                # Every try has an id of its own: the stream takes a second message of one id for
                # the first again, and acknowledges it, and then two would think they had won.
                event_id=f"{asked.key}.begun.{self._settings.tool_replica}.{asked.delivery}",
                session_id=asked.session_id,
                cause=keys.of(asked.session_id, keys.tool_call(asked.step, asked.turn)),
                traceparent=asked.traceparent,
                expected_sequence=0,
            )
        except PublishRefused as refused:
            raise Later(self._settings.tool_retry_s_min, f"{asked.key} was begun") from refused

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

    # -- answers -------------------------------------------------------------------------------

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

    def _event(
        self, asked: Asked, outcome: Outcome, seconds: float, blob: str | None = None
    ) -> Event:
        told = ToolAnswerCircumstance(
            lane=asked.lane,
            replica=self._settings.tool_replica,
            tool=asked.name,
            seconds=round(seconds, 6),
        )
        about = asked.about() | {"turn_hash": asked.turn_hash}
        if isinstance(outcome, Failure):
            log.info("%s: %s", asked.key, outcome.code)
            fact = ToolFailedFact(
                **about,
                code=outcome.code,
                message=outcome.message,
                retryable=outcome.retryable,
            )
            return ToolFailed(fact=fact, circumstance=told)
        content = b"" if blob is not None else outcome
        whole = ToolReturnedFact(**about, content=content, blob=blob)
        return ToolReturned(fact=whole, circumstance=told)

    def _answer_again(self, asked: Asked, row: LogRow) -> Event:
        """The answer that the log has, for a lane that may not have heard it."""
        told = ToolAnswerCircumstance(
            lane=asked.lane, replica=self._settings.tool_replica, tool=asked.name
        )
        fact = fact_map(row)
        fact |= {"turn_hash": fact_bytes(fact, "turn_hash")}
        if row.kind == TOOL_RETURNED:
            whole = ToolReturnedFact(**fact | {"content": fact_bytes(fact, "content")})
            return ToolReturned(fact=whole, circumstance=told)
        return ToolFailed(fact=ToolFailedFact(**fact), circumstance=told)

    async def _publish(self, event: Event, asked: Asked) -> None:
        key = keys.tool_result(asked.step, asked.turn, asked.index)
        await self._bus.publish(
            event,
            asked.lane,
            source=f"{SOURCE}/{self._settings.tool_replica}",
            time=self._now(),
            event_id=f"{asked.session_id}.{key}.{asked.sequence}".replace(":", "."),
            session_id=asked.session_id,
            cause=keys.of(asked.session_id, keys.tool_call(asked.step, asked.turn)),
            traceparent=asked.traceparent,
        )


def _judged(outcome: Outcome, document: ToolDocument) -> Outcome:
    """A failure in whose midst the tool was: another call is safe only if the tool says so."""
    if isinstance(outcome, Failure) and outcome.code in ("deadline", "tool_crashed"):
        return Failure(outcome.code, outcome.message, document.idempotent)
    return outcome


def may_be_made(stored: datetime, sent: datetime, delivered: int, *, again: bool) -> bool:
    """Whether calls of a message may have been made before: then what is known of them is asked
    for, which costs a wait for the log.

    Its lane says so where it asks again, and the server where it delivers again. A message that
    was sent again after the server's duplicate window is another message and looks like the first;
    it was stored long after it was made.
    """
    return again or delivered > 1 or (stored - sent).total_seconds() > DUPLICATE_WINDOW_S / 2


def _read(message: Message) -> list[Asked]:
    event = message.event()
    if not isinstance(event, ToolCalled):
        raise BadMessage(f"{type(event).__name__} on {message.subject}")
    fact, told = event.fact, event.circumstance
    envelope = message.envelope()
    maybe_made = may_be_made(message.time, envelope.time, message.delivered, again=told.again)
    try:
        subjects.token(told.lane)
    except ValueError as error:
        raise BadMessage(f"circumstance.lane: {error}") from error
    return [
        Asked(
            fact.session_id,
            fact.step,
            fact.turn,
            index,
            fact.turn_hash,
            call.function.name,
            call.function.arguments,
            told.tools.get(call.function.name),
            told.lane,
            message.sequence,
            f"{message.sequence}.{message.delivered}",
            maybe_made,
            envelope.traceparent,
        )
        for index, call in enumerate(fact.calls)
    ]
