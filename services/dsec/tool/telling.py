"""What the service says of a call: that it begins, that an attempt failed, what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

from dsec.platform.bus import Bus, Later, PublishRefused
from dsec.session.log_row import TOOL_RETURNED, LogRow, fact_bytes, fact_map
from dsec.tool.asked import Asked
from dsec.tool.frames import Failure, Outcome
from dsec_contracts import Event, ToolBegun, ToolFailed, ToolRetried, ToolReturned, keys
from dsec_contracts.tool import (
    ToolAnswerCircumstance,
    ToolBegunFact,
    ToolFailedFact,
    ToolRetriedCircumstance,
    ToolRetriedFact,
    ToolReturnedFact,
)

log = logging.getLogger(__name__)

SOURCE = "dsec/tool"


class Teller:
    """Publishes in the name of one replica."""

    def __init__(
        self, bus: Bus, replica: str, begun_retry_s: float, now: Callable[[], datetime]
    ) -> None:
        """Prepare.

        Args:
            begun_retry_s: when a call that somebody else has begun is looked at again.
        """
        self._bus = bus
        self._replica = replica
        self._begun_retry_s = begun_retry_s
        self._now = now

    async def begin(self, asked: Asked) -> None:
        """Note that a call is about to be made, if nobody did.

        Raises:
            Later: somebody did.
        """
        event = ToolBegun(
            fact=ToolBegunFact(**asked.about()), circumstance=self.circumstance(asked)
        )
        event_id = self.begun_id(asked)
        key = f"{asked.session_id}-{asked.id}"
        try:
            await self._publish(event, key, asked, event_id, expected_sequence=0)
        except PublishRefused as refused:
            raise Later(self._begun_retry_s, f"{asked.key} was begun") from refused

    def begun_id(self, asked: Asked) -> str:
        """By which this delivery begins a call. Every try has an id of its own: the stream takes a
        second message of one id for the first again, and acknowledges it, and then two would think
        they had won."""
        return f"{asked.key}.begun.{self._replica}.{asked.delivery}"

    async def retried(self, asked: Asked, attempt: int, failure: Failure, pause_s: float) -> None:
        """An attempt failed, and another follows after a pause."""
        log.info("%s: attempt %d: %s", asked.key, attempt, failure.code)
        told = ToolRetriedCircumstance(
            replica=self._replica,
            tool=asked.name,
            code=failure.code,
            message=failure.message,
            pause_s=round(pause_s, 6),
        )
        fact = ToolRetriedFact(**asked.about(), attempt=attempt)
        await self._publish(
            ToolRetried(fact=fact, circumstance=told),
            f"{asked.session_id}-{asked.id}",
            asked,
            f"{asked.key}.retried.{attempt}.{asked.delivery}",
        )

    async def answer(
        self,
        asked: Asked,
        outcome: Outcome,
        told: ToolAnswerCircumstance,
        blob: str | None = None,
    ) -> None:
        """What came of a call, to the lane that asked.

        Args:
            blob: where a result lies that does not travel itself.

        Raises:
            TooLarge: it fits no message.
        """
        about = asked.about() | {"turn_hash": asked.turn_hash}
        event: Event
        if isinstance(outcome, Failure):
            log.info("%s: %s", asked.key, outcome.code)
            fact = ToolFailedFact(
                **about, code=outcome.code, message=outcome.message, retryable=outcome.retryable
            )
            event = ToolFailed(fact=fact, circumstance=told)
        else:
            content = b"" if blob is not None else outcome
            whole = ToolReturnedFact(**about, content=content, blob=blob)
            event = ToolReturned(fact=whole, circumstance=told)
        await self._answer(event, asked)

    async def answer_again(self, asked: Asked, row: LogRow) -> None:
        """The answer that the log has, for a lane that may not have heard it."""
        told, fact = self.circumstance(asked), fact_map(row)
        fact |= {"turn_hash": fact_bytes(fact, "turn_hash")}
        event: Event
        if row.kind == TOOL_RETURNED:
            whole = ToolReturnedFact(**fact | {"content": fact_bytes(fact, "content")})
            event = ToolReturned(fact=whole, circumstance=told)
        else:
            event = ToolFailed(fact=ToolFailedFact(**fact), circumstance=told)
        await self._answer(event, asked)

    def circumstance(self, asked: Asked, **more: Any) -> ToolAnswerCircumstance:
        """Who says it, of what."""
        return ToolAnswerCircumstance(
            lane=asked.lane, replica=self._replica, tool=asked.name, **more
        )

    async def _answer(self, event: Event, asked: Asked) -> None:
        key = keys.tool_result(asked.step, asked.turn, asked.index)
        event_id = f"{asked.session_id}.{key}.{asked.sequence}".replace(":", ".")
        await self._publish(event, asked.lane, asked, event_id)

    async def _publish(
        self, event: Event, key: str, asked: Asked, event_id: str, **options: Any
    ) -> None:
        await self._bus.publish(
            event,
            key,
            source=f"{SOURCE}/{self._replica}",
            time=self._now(),
            event_id=event_id,
            session_id=asked.session_id,
            cause=keys.of(asked.session_id, keys.tool_call(asked.step, asked.turn)),
            traceparent=asked.traceparent,
            **options,
        )
