"""A whole session in one process: no bus, no database, a list in place of the log.

The rows have the shape the database gives, so folds, verification and tests take them as they are.
It is also what checks an agent, an environment and a reward function before they are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from dsec.session.anchor_record import Frozen, frozen
from dsec.session.documents import AgentDocument, EnvDocument, seal
from dsec.session.interposition import Interposition
from dsec.session.io import (
    Call,
    Called,
    Input,
    SessionConfig,
    Started,
    Stepped,
    missing_input,
    reward_input,
)
from dsec.session.log_row import LogRow
from dsec.session.machine import SessionMachine
from dsec.session.memory_log import Failed, MemoryLog
from dsec.session.program import Program, load_program
from dsec.session.whole_episode import EpisodeStep, pack_episode
from dsec_contracts import keys
from dsec_contracts.canonical import encode
from dsec_contracts.reward import CAUSE_BYTES
from dsec_contracts.session import RequestFact, SessionRequested


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


CallTool = Callable[[Call], Any]
"""Makes a call: what the tool returns, or `Failed`."""


def no_tools(call: Call) -> Failed:
    """For sessions whose agents have no tools."""
    return Failed("tool_absent", f"nobody makes {call.name}")


def scored_fact(step: int, score: ScoreLike, cause: bytes, revision: int = 1) -> bytes:
    """The canonical fact of a reward."""
    components = {name: list(pair) for name, pair in score.components.items()}
    return encode([step, revision, score.value, components, cause])


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
    anchors = Anchors(log, machine, blobs)
    output = machine.start()
    if isinstance(output, Started):
        log.started(output)
        prior = output.observation
        rewards = Rewards(log, scorer, per_episode=config.reward_per_episode)
        while machine.ended is None and (steps_max is None or machine.steps < steps_max):
            stepped = machine.step()
            turn = stepped if isinstance(stepped, Called) else None
            if isinstance(stepped, Stepped):
                log.stepped(stepped)
                anchors.log()
                if (reward := rewards.of(stepped, prior)) is not None:
                    machine.deliver(reward())
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


class Anchors:
    """What one session's machine captures, until the row of the step it belongs to is logged."""

    def __init__(
        self, log: MemoryLog, machine: SessionMachine, blobs: MutableMapping[str, bytes] | None
    ) -> None:
        """`blobs`: takes those of the anchors; None: nothing is captured."""
        self._log = log
        self._blobs = {} if blobs is None else blobs
        self._captured: list[Frozen] = []
        if blobs is not None:
            machine.on_anchor = lambda taken: self._captured.append(frozen(taken))

    def log(self) -> None:
        """Log those captured since."""
        while self._captured:
            anchor = self._captured.pop()
            self._blobs[self._log.anchored(anchor)] = anchor.blob


class Rewards:
    """Which steps of one session are rewarded, and how."""

    def __init__(self, log: MemoryLog, scorer: ScorerLike, *, per_episode: bool) -> None:
        self._log = log
        self._scorer = scorer
        self._per_episode = per_episode
        self._episode: list[EpisodeStep] = []

    def of(self, stepped: Stepped, prior: bytes) -> Callable[[], Input] | None:
        """What gives a step its reward, or that of its episode; None: it gets none."""
        given = EpisodeStep(stepped.fact, prior, stepped.observation)
        if self._per_episode:
            self._episode.append(given)
            if stepped.closes_from is None:
                return None
            given = EpisodeStep(pack_episode(self._episode), b"", b"")
            self._episode = []
        return partial(_scored_or_missing, self._log, self._scorer, stepped, given)


def _scored_or_missing(
    log: MemoryLog, scorer: ScorerLike, stepped: Stepped, given: EpisodeStep
) -> Input:
    """Score a step, log the reward or that there is none, and give it as the session's input."""
    step, cause = stepped.step, stepped.chain[:CAUSE_BYTES]
    try:
        score = scorer.score(*given)
        fact = scored_fact(step, score, cause)
    except Exception as error:  # noqa: BLE001 - the reward function is user code
        code, fatal = getattr(error, "code", "reward_raised"), getattr(error, "fatal", False)
        notice = missing_input(step, str(code), bool(fatal), str(error), cause)
        log.missing(notice)
        return notice
    log.scored(step, score.value, fact)
    return reward_input(step, score.value, fact, cause)
