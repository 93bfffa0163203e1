"""A list in place of the log: the rows of one session, in the shape that the database gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from uuid import UUID

from dsec.session import log_row
from dsec.session.anchor_record import Frozen, captured_fact
from dsec.session.io import (
    Called,
    Ended,
    Input,
    Started,
    Stepped,
    curriculum_input,
    failure_content,
    result_input,
)
from dsec.session.log_row import LogRow
from dsec.session.tools import called_fact
from dsec_contracts import (
    AnchorCaptured,
    AnchorStored,
    CurriculumChanged,
    Event,
    RewardDeferred,
    RewardMissing,
    SessionEnded,
    SessionStarted,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    keys,
)
from dsec_contracts.anchor import AnchorCapturedCircumstance, AnchorStoredFact
from dsec_contracts.canonical import encode
from dsec_contracts.curriculum import CurriculumCircumstance, CurriculumFact
from dsec_contracts.keys import session_time
from dsec_contracts.reward import RewardMissingCircumstance, RewardNoticeFact
from dsec_contracts.session import (
    EndedCircumstance,
    EndedFact,
    StartedCircumstance,
    StartedFact,
)
from dsec_contracts.tool import ToolFailedFact, ToolReturnedFact


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of what a tool returns: why it does not."""

    code: str
    message: str = ""
    retryable: bool = False


@dataclass(slots=True)
class MemoryLog:
    """The rows of one session, each a message of its own."""

    session_id: UUID
    rows: list[LogRow] = field(default_factory=list)

    def append(self, key: str, kind: str, fact: bytes, **columns: Any) -> None:
        """One more row, behind all others."""
        sequence = len(self.rows) + 1
        self.rows.append(
            LogRow(
                session_id=self.session_id,
                key=key,
                kind=kind,
                version=1,
                epoch=1,
                sequence=sequence,
                index=0,
                fact=fact,
                event_id=f"{self.session_id}.{sequence}",
                event_time=session_time(self.session_id),
                **columns,
            )
        )

    def event(self, key: str, event: Event, **columns: Any) -> None:
        """The row of a cold event."""
        circumstance: Any = getattr(event, "circumstance").model_dump(mode="json")  # noqa: B009
        fact = encode(event.fact_value())
        self.append(key, event.event_name(), fact, circumstance=circumstance, **columns)

    def started(self, output: Started, attempt: int = 1) -> None:
        """The row of a start."""
        event = SessionStarted(
            fact=StartedFact(session_id=self.session_id, reset=output.reset, chain=output.chain),
            circumstance=StartedCircumstance(attempt=attempt, observation=output.observation),
        )
        self.event(
            keys.STARTED,
            event,
            attempt=attempt,
            chain=output.chain,
            observation=output.observation,
        )

    def stepped(self, output: Stepped, attempt: int = 1) -> None:
        """The row of a step."""
        self.append(
            keys.step(output.step),
            log_row.STEPPED,
            output.fact,
            step=output.step,
            episode=output.episode,
            attempt=attempt,
            value=output.env_reward,
            terminated=output.terminated,
            truncated=output.truncated,
            chain=output.chain,
            observation=output.observation,
            reset_observation=output.reset_observation or None,
            extras=output.extras or None,
            cause=output.cause.decode(),
        )

    def scored(self, step: int, value: float, fact: bytes, revision: int = 1) -> None:
        """The row of a reward."""
        key, cause = keys.reward(step, revision), keys.step(step)
        self.append(key, log_row.REWARD_SCORED, fact, step=step, value=value, cause=cause)

    def missing(self, given: Input) -> None:
        """The row of a notice that a reward will not come."""
        event = RewardMissing(
            fact=RewardNoticeFact(
                session_id=self.session_id,
                step=given.ordinal,
                code=given.code,
                fatal=given.fatal,
                cause=given.cause,
            ),
            circumstance=RewardMissingCircumstance(message=given.message),
        )
        self.event(keys.reward_missing(given.ordinal), event, step=given.ordinal)

    def deferred(self, given: Input) -> None:
        """The row of a notice that a reward comes later."""
        fact = RewardNoticeFact(
            session_id=self.session_id, step=given.ordinal, code=given.code, cause=given.cause
        )
        key = keys.reward_deferred(given.ordinal)
        self.event(key, RewardDeferred(fact=fact), step=given.ordinal)

    def changed(self, n: int, level: int, previous_level: int) -> Input:
        """The row of a change of the curriculum level. Returns it as the session's input."""
        fact = CurriculumFact(
            session_id=self.session_id, n=n, level=level, previous_level=previous_level
        )
        told = CurriculumCircumstance(why="threshold")
        self.event(keys.curriculum(n), CurriculumChanged(fact=fact, circumstance=told))
        return curriculum_input(n, level)

    def called(self, turn: Called) -> None:
        """The row of a turn of tool calls."""
        event = ToolCalled(fact=called_fact(self.session_id, turn))
        key = keys.tool_call(turn.step, turn.turn)
        self.event(key, event, step=turn.step, cause=turn.cause.decode())

    def answered(self, turn: Called, index: int, result: Any) -> Input:
        """The row of what came of a call. Returns it as the session's input."""
        about = {
            "session_id": self.session_id,
            "step": turn.step,
            "turn": turn.turn,
            "index": index,
            "turn_hash": turn.turn_hash,
        }
        event: Event
        ordinal = keys.call_ordinal(turn.step, turn.turn, index)
        if isinstance(result, Failed):
            fact = ToolFailedFact(
                **about, code=result.code, message=result.message, retryable=result.retryable
            )
            event = ToolFailed(fact=fact)
            content = failure_content(fact.message, fact.retryable)
            given = result_input(ordinal, fact.code, content, turn.turn_hash)
        else:
            content = encode(result)
            event = ToolReturned(fact=ToolReturnedFact(**about, content=content))
            given = result_input(ordinal, "", content, turn.turn_hash)
        self.event(
            keys.tool_result(turn.step, turn.turn, index),
            event,
            step=turn.step,
            cause=keys.tool_call(turn.step, turn.turn),
        )
        return given

    def anchored(self, anchor: Frozen) -> str:
        """The rows of an anchor that was captured and stored. Returns the name of its blob."""
        taken, size = anchor.taken, len(anchor.blob)
        blob = sha256(anchor.blob).hexdigest()
        told = AnchorCapturedCircumstance(blob=blob, size_bytes=size)
        event = AnchorCaptured(fact=captured_fact(self.session_id, taken), circumstance=told)
        key = keys.anchor(taken.position)
        self.event(key, event, cause=keys.step(taken.position - 1))
        stored = AnchorStoredFact(
            session_id=self.session_id,
            position=taken.position,
            anchor_id=taken.anchor_id,
            blob=blob,
            size_bytes=size,
        )
        self.event(keys.anchor_result(taken.position), AnchorStored(fact=stored), cause=key)
        return blob

    def ended(self, output: Ended, attempt: int = 1) -> None:
        """The row of an end."""
        event = SessionEnded(
            fact=EndedFact(
                session_id=self.session_id,
                status=output.status,
                code=output.code,
                steps=output.steps,
                episodes=output.episodes,
                inputs=output.inputs,
                chain=output.chain,
            ),
            circumstance=EndedCircumstance(attempt=attempt, message=output.message),
        )
        self.event(keys.ENDED, event, attempt=attempt, chain=output.chain)
