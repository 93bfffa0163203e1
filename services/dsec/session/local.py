"""A whole session in one process: no bus, no database, a list in place of the log.

The rows have the shape the database gives, so folds, verification and tests take them as they are.
It is also what checks an agent, an environment and a reward function before they are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol
from uuid import UUID

from dsec.session.anchor_record import Frozen, captured_fact, frozen
from dsec.session.documents import AgentDocument, EnvDocument, seal
from dsec.session.interposition import Interposition
from dsec.session.io import (
    Call,
    Called,
    Ended,
    Input,
    SessionConfig,
    Started,
    Stepped,
    curriculum_input,
    failure_content,
    missing_input,
    result_input,
    reward_input,
)
from dsec.session.log_row import LogRow
from dsec.session.machine import SessionMachine
from dsec.session.program import Program, load_program
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
from dsec_contracts.reward import RewardNoticeCircumstance, RewardNoticeFact
from dsec_contracts.session import (
    EndedCircumstance,
    EndedFact,
    RequestFact,
    SessionRequested,
    StartedCircumstance,
    StartedFact,
)
from dsec_contracts.tool import ToolFailedFact, ToolReturnedFact

CAUSE_BYTES = 16


class ScoreLike(Protocol):
    """A reward: the weighted total and its components, name to (score, weight)."""

    @property
    def value(self) -> float: ...
    @property
    def components(self) -> Mapping[str, Any]: ...


class ScorerLike(Protocol):
    """What gives a step its reward, deterministically. It raises where it cannot; `code` and
    `fatal` of the error, where it has them, go into the notice that there is no reward."""

    def score(self, step_fact: bytes, observation: bytes, next_observation: bytes) -> ScoreLike: ...


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of what a tool returns: why it does not."""

    code: str
    message: str = ""
    retryable: bool = False


CallTool = Callable[[Call], Any]
"""Makes a call: what the tool returns, or `Failed`."""


def no_tools(call: Call) -> Failed:
    """For sessions whose agents have no tools."""
    return Failed("tool_absent", f"nobody makes {call.name}")


def scored_fact(step: int, score: ScoreLike, cause: bytes, revision: int = 1) -> bytes:
    """The canonical fact of a reward."""
    components = {name: list(pair) for name, pair in score.components.items()}
    return encode([step, revision, score.value, components, cause])


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
            "session.stepped",
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
        self.append(key, "reward.scored", fact, step=step, value=value, cause=cause)

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
            circumstance=RewardNoticeCircumstance(message=given.message),
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


def local_program(
    agent: AgentDocument,
    agent_files: Mapping[str, bytes],
    env: EnvDocument,
    env_files: Mapping[str, bytes],
) -> Program:
    """The program of documents and files that are not registered.

    Raises:
        ProgramError: see `load_program`.
    """
    return load_program(*seal("agent", agent, agent_files), *seal("env", env, env_files))


def run_in_memory(
    program: Program,
    config: SessionConfig,
    session_id: UUID,
    scorer: ScorerLike,
    *,
    interposition: Interposition | None = None,
    request: RequestFact | None = None,
    call_tool: CallTool = no_tools,
    steps_max: int | None = None,
    blobs: MutableMapping[str, bytes] | None = None,
) -> list[LogRow]:
    """Run a session and give the rows of its log.

    Args:
        scorer: what rewards the steps.
        request: logged as the first row where it is given.
        call_tool: what makes the agent's tool calls.
        blobs: takes the blobs of the session's anchors; without it none are captured.
        steps_max: stop there, without an end, as a session does whose worker is killed.
    """
    log = MemoryLog(session_id)
    if request is not None:
        log.event(keys.REQUESTED, SessionRequested(fact=request))
    machine = SessionMachine(program, config, interposition)
    anchors: list[Frozen] = []
    if blobs is not None:
        machine.on_anchor = lambda taken: anchors.append(frozen(taken))
    output = machine.start()
    if isinstance(output, Started):
        log.started(output)
        prior = output.observation
        while machine.ended is None and (steps_max is None or machine.steps < steps_max):
            stepped = machine.step()
            turn = stepped if isinstance(stepped, Called) else None
            if isinstance(stepped, Stepped):
                log.stepped(stepped)
                while anchors and blobs is not None:
                    anchor = anchors.pop()
                    blobs[log.anchored(anchor)] = anchor.blob
                machine.deliver(scored_or_missing(log, scorer, stepped, prior))
                prior = stepped.reset_observation or stepped.observation
                turn = stepped.called
            if turn is not None:
                log.called(turn)
                for index, call in enumerate(turn.calls):
                    machine.deliver(log.answered(turn, index, call_tool(call)))
    if machine.ended is not None:
        log.ended(machine.ended)
    machine.close()
    return log.rows


def scored_or_missing(log: MemoryLog, scorer: ScorerLike, stepped: Stepped, prior: bytes) -> Input:
    """Score a step, log the reward or that there is none, and give it as the session's input."""
    step, cause = stepped.step, stepped.chain[:CAUSE_BYTES]
    try:
        score = scorer.score(stepped.fact, prior, stepped.observation)
        fact = scored_fact(step, score, cause)
    except Exception as error:  # noqa: BLE001 - the reward function is user code
        code, fatal = getattr(error, "code", "reward_raised"), getattr(error, "fatal", False)
        notice = missing_input(step, str(code), bool(fatal), str(error), cause)
        log.missing(notice)
        return notice
    log.scored(step, score.value, fact)
    return reward_input(step, score.value, fact, cause)
