"""What becomes of a session that has ended: its provenance is audited, and that is published.

Most agents give none and call no tools: about those nothing is published. The audit is a function
of the log up to the session's end, so whoever repeats it publishes the same fact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from uuid import UUID

from dsec.evaluator.audit import Audit, audit
from dsec.evaluator.settings import EvaluatorSettings
from dsec.platform.bus import BadMessage, Bus, Message, Settler
from dsec.platform.log import LogReader
from dsec.platform.telemetry import OFF, Telemetry, metrics
from dsec.session import log_row
from dsec_contracts import PolicySanityChecked, SessionEnded, keys
from dsec_contracts.canonical import decode
from dsec_contracts.evaluation import PolicySanityCircumstance, PolicySanityFact

CONSUMER = "evaluator"
SOURCE = "dsec/evaluator"


class Evaluator:
    """Audits sessions, one after the other."""

    def __init__(
        self,
        bus: Bus,
        log: LogReader,
        settings: EvaluatorSettings,
        now: Callable[[], datetime],
        telemetry: Telemetry = OFF,
    ) -> None:
        self._bus = bus
        self._log = log
        self._settings = settings
        self._now = now
        self._settler = Settler(
            bus,
            CONSUMER,
            self._handle,
            ack_wait_s=settings.evaluator_ack_wait_s,
            retry_s_min=settings.evaluator_retry_s_min,
            retry_s_max=settings.evaluator_retry_s_max,
        )
        self.sessions = 0
        telemetry.counter(metrics.DEAD_LETTERS, lambda: self._settler.dead_letters)

    async def on_session_ended(self, message: Message) -> None:
        """Audit one session and acknowledge; never raises."""
        await self._settler.handle(message)

    async def _handle(self, message: Message) -> None:
        event = message.event_of(SessionEnded)
        await self._log.wait_floor(message.sequence, self._settings.evaluator_floor_wait_s)
        session_id = event.fact.session_id
        self.sessions += 1
        rows = await self._log.said_rows(session_id)
        found = audit(event.fact.steps, rows)
        if found.says_nothing:
            return
        requested = next((row for row in rows if row.kind == log_row.REQUESTED), None)
        if requested is None:
            raise BadMessage(f"session {session_id} ended, and the log has no request for it")
        fact = sanity_fact(session_id, decode(requested.fact)["agent_spec"], found)
        replica = PolicySanityCircumstance(replica=self._settings.evaluator_replica)
        await self._bus.publish(
            PolicySanityChecked(fact=fact, circumstance=replica),
            session_id,
            source=f"{SOURCE}/{self._settings.evaluator_replica}",
            time=self._now(),
            event_id=f"{session_id}.{keys.SANITY_CHECKED}",
            session_id=session_id,
            cause=keys.of(session_id, keys.ENDED),
            traceparent=message.envelope().traceparent,
        )


def sanity_fact(session_id: UUID, agent_spec: str, found: Audit) -> PolicySanityFact:
    """An audit as it is published."""
    counts = asdict(found)
    counts["unknown_calls"] = [call._asdict() for call in found.unknown_calls]
    return PolicySanityFact(session_id=session_id, agent_spec=agent_spec, **counts)
