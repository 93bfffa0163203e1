"""What the scheduler does to the world: publishes what its intents say.

Ids of events derive from what they are about, so that the same intent carried out twice, or by two
schedulers, is one message where the server still remembers the first, and one row of the log
where it does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from dsec.platform.bus import Author, Bus, PublishRefused, TooLarge
from dsec.platform.log import LogBehind, Position
from dsec.scheduler.history import History, LogGap, SessionTail
from dsec.scheduler.intents import ChangeLevel, End, Fence, Intent, Place, Reject, RequestCancel
from dsec.session.chain import chain_end
from dsec_contracts import keys, subjects
from dsec_contracts.canonical import encode
from dsec_contracts.curriculum import (
    CurriculumChanged,
    CurriculumCircumstance,
    CurriculumFact,
)
from dsec_contracts.envelope import Event
from dsec_contracts.session import (
    CancelCircumstance,
    CancelFact,
    EndedCircumstance,
    EndedFact,
    PlacedCircumstance,
    PlacedFact,
    RejectCircumstance,
    RejectFact,
    SessionCancelRequested,
    SessionEnded,
    SessionPlaced,
    SessionRejected,
)
from dsec_contracts.worker import FencedCircumstance, FencedFact, WorkerFenced

log = logging.getLogger(__name__)

SOURCE = "dsec/scheduler"
NO_INPUTS = encode([])


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An intent came to nothing; the state should issue it again.

    `placed_sequence`: where the stream really has the session's last placement.
    """

    placed_sequence: int | None = None


class Effects:
    """Carries intents out."""

    def __init__(
        self,
        bus: Bus,
        history: History,
        *,
        epoch: int,
        restart_wait_s: float,
        now: Callable[[], datetime],
    ) -> None:
        self._bus = bus
        self._author = Author(bus, SOURCE, now)
        self._history = history
        self._epoch = epoch
        self._restart_wait_s = restart_wait_s
        self._now = now

    async def carry_out(self, intent: Intent) -> Withdrawn | None:
        """Publish what an intent says. None: done, and the stream will show it.

        Raises:
            BusError: the bus would not have it, for a reason that does not pass.
        """
        match intent:
            case Reject():
                await self._reject(intent)
            case Place():
                return await self._place(intent)
            case Fence():
                await self._fence(intent)
            case End():
                return await self._end(intent)
            case RequestCancel():
                await self._request_cancel(intent)
            case ChangeLevel():
                await self._change_level(intent)
        return None

    async def _reject(self, intent: Reject) -> None:
        log.info("request %s is rejected: %s (%s)", intent.event_id, intent.code, intent.message)
        event = SessionRejected(
            fact=RejectFact(
                event_id=intent.event_id,
                code=intent.code,
                field=intent.field,
                session_id=intent.session_id,
            ),
            circumstance=RejectCircumstance(message=intent.message),
        )
        token = subjects.any_token(intent.event_id)
        cause = None
        if intent.code != "malformed" and intent.session_id is not None:
            cause = keys.of(UUID(intent.session_id), keys.REQUESTED)
        await self._author.publish(event, token, f"rejected.{token}", cause)

    async def _place(self, intent: Place) -> Withdrawn | None:
        event = SessionPlaced(
            fact=PlacedFact(
                session_id=intent.session_id,
                attempt=intent.attempt,
                worker=intent.worker,
                lane=intent.lane,
                previous_lane=intent.previous_lane,
                alone=intent.alone,
            ),
            circumstance=PlacedCircumstance(
                request=intent.request,
                reason=intent.reason,
                epoch=self._epoch,
                heartbeat_period_s=intent.heartbeat_period_s,
            ),
        )
        try:
            await self._publish(event, intent, f"placed.{intent.attempt}", intent.expected_sequence)
        except PublishRefused:
            subject = subjects.subject(event.event_name(), intent.session_id)
            return Withdrawn(await self._bus.last_sequence(subject))
        except TooLarge as error:
            code, message = "request_too_large", str(error)
            end = End(intent.session_id, "failed", code, message, 0, intent.cause, None)
            return await self._end(end)
        return None

    async def _fence(self, intent: Fence) -> None:
        log.warning(
            "worker %s is fenced: %s; %d sessions move",
            intent.worker,
            intent.reason,
            intent.sessions,
        )
        # First the fence: whoever is told of it may rely on nothing more getting in.
        await self._bus.fence(intent.worker, SOURCE)
        event = WorkerFenced(
            fact=FencedFact(worker=intent.worker, reason=intent.reason, culprit=intent.culprit),
            circumstance=FencedCircumstance(detail=intent.detail, sessions=intent.sessions),
        )
        cause = None
        if intent.culprit is not None and intent.culprit.step > 0:
            cause = keys.of(intent.culprit.session_id, keys.step(intent.culprit.step - 1))
        await self._author.publish(event, intent.worker, f"{intent.worker}.fenced", cause)

    async def _request_cancel(self, intent: RequestCancel) -> None:
        event = SessionCancelRequested(
            fact=CancelFact(session_id=intent.session_id),
            circumstance=CancelCircumstance(reason="its deadline has passed", code=intent.code),
        )
        await self._publish(event, intent, f"cancel_requested.{intent.code}")

    async def _change_level(self, intent: ChangeLevel) -> None:
        log.info(
            "session %s goes from level %d to %d: %s",
            intent.session_id,
            intent.previous_level,
            intent.level,
            intent.why,
        )
        event = CurriculumChanged(
            fact=CurriculumFact(
                session_id=intent.session_id,
                n=intent.n,
                level=intent.level,
                previous_level=intent.previous_level,
            ),
            circumstance=CurriculumCircumstance(
                why=intent.why,
                lane=intent.lane,
                lag_steps=intent.lag_steps,
                for_s=intent.for_s,
                episodes=intent.episodes,
                success_mean=intent.success_mean,
            ),
        )
        await self._publish(event, intent, f"curriculum.{intent.n}")

    async def _end(self, intent: End) -> Withdrawn | None:
        tail: SessionTail | None = SessionTail(None, 0, 0)
        if intent.log_sequence is not None:
            tail = await self._tail(intent.session_id, intent.log_sequence)
        if tail is None:
            return Withdrawn()
        chain = chain_end(
            tail.chain, intent.status, intent.code, tail.steps, tail.episodes, NO_INPUTS
        )
        event = SessionEnded(
            fact=EndedFact(
                session_id=intent.session_id,
                status=intent.status,
                code=intent.code,
                steps=tail.steps,
                episodes=tail.episodes,
                inputs=NO_INPUTS,
                chain=chain,
            ),
            circumstance=EndedCircumstance(
                attempt=intent.attempt, message=intent.message, at=self._now()
            ),
        )
        await self._publish(event, intent, "ended.scheduler")
        return None

    async def _publish(
        self,
        event: Event,
        intent: Place | End | RequestCancel | ChangeLevel,
        what: str,
        expected_sequence: int | None = None,
    ) -> None:
        """Publish an event of a session. `what`: its name among those of the session."""
        session_id = intent.session_id
        await self._author.publish(
            event,
            session_id,
            f"{session_id}.{what}",
            intent.cause,
            session_id=session_id,
            expected_sequence=expected_sequence,
        )

    async def _tail(self, session_id: UUID, sequence: int) -> SessionTail | None:
        """How far the session got by `sequence`, from the log; None: the log is behind or away."""
        try:
            if sequence > 0:
                await self._history.wait_floor(
                    Position(self._epoch, sequence), self._restart_wait_s
                )
            return await self._history.tail(session_id)
        except (LogBehind, SQLAlchemyError, OSError, LogGap) as error:
            log.warning("session %s cannot end yet: %s", session_id, error)
        return None
