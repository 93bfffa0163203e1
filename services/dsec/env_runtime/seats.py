"""A seat: one session on this worker, from its placement until it is stepped in a lane.

A first attempt starts from nothing. A later one comes back from the log: it waits until the
recorder has passed the position of its own placement, reads the log up to there and nothing else,
re-executes and compares, and then goes on live.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, NamedTuple

from dsec.env_runtime.call_counts import CallCounts
from dsec.env_runtime.loading import Loaded as LoadedAnchor
from dsec.env_runtime.packing import Sender
from dsec.env_runtime.running import RunningSlot
from dsec.platform.interposition import interposition_for
from dsec.platform.log import LogBehind, LogReader
from dsec.platform.objects import ObjectStore, ObjectStoreError
from dsec.platform.specs import Absent, blob_content, spec_content
from dsec.platform.virtual import undeclared_uses
from dsec.session.anchor_record import Compared, Frozen
from dsec.session.anchor_restore import NotRestorable, restored
from dsec.session.chain import chain_end
from dsec.session.documents import RewardDocument, SpecError, unseal
from dsec.session.io import AWAITS_LATE, AWAITS_RESULTS, Called, Ended, Input, Started, Stepped
from dsec.session.log_row import RecordedGap
from dsec.session.machine import Interposition, SessionMachine
from dsec.session.program import Program, ProgramError, load_program, session_config
from dsec.session.rerun import (
    Divergence,
    Recorded,
    RecordedInvalid,
    rerun_steps,
    undelivered,
)
from dsec_contracts import SYSTEM_SESSION, keys
from dsec_contracts.canonical import decode, encode
from dsec_contracts.session import PlacedFact, RequestFact, ResumedCircumstance
from dsec_contracts.step import STEP_FIELDS
from dsec_contracts.tool import ToolUse

log = logging.getLogger(__name__)

PROGRAMS_MAX = 64
POLICIES_MAX = 16
REWARD_SPECS_MAX = 1024
SPEC_WAIT_S = 30.0
NOT_RESUMABLE = (
    "the environment is not executed again (deterministic_mode: false), and no anchor right behind "
    "the last recorded step could be used"
)
UNPUBLISHABLE = "row_too_large"
"""The code of a session whose start or step fits no message of the server."""


class Tail(NamedTuple):
    """The position of an attempt's own placement: what came before it is in the log."""

    sequence: int
    epoch: int | None
    """None where the placement does not say: the epoch that the log is in."""


class NotNow(Exception):
    """A session that cannot be opened because something is away. It is handed back, not ended."""


class StartFailed(Exception):
    """A session that cannot start, with the code it ends with."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.recorded: Recorded | None = None
        """What an earlier attempt left in the log, which the end has to close."""


@dataclass(slots=True)
class Seat:
    """A session on this worker."""

    request: RequestFact
    placed: PlacedFact
    index: int
    machine: SessionMachine
    step_deadline_s: float
    inline_bytes_max: int
    above: str
    sender: Sender
    tools: Mapping[str, ToolUse] = field(default_factory=dict)
    """What the agent may call, by name."""
    calls_max: int | None = None
    """How many calls it may make in all."""
    call_counts: CallCounts = field(default_factory=CallCounts)
    undeclared_uses: str = ""
    last: Stepped | None = None
    chain_before: bytes | None = None
    """The chain before the last step: an end that leaves that step out closes this one."""
    published_ns: int = 0
    """When the last step was published (monotonic): an unanswered one is published again."""
    repeats: int = 0
    trace_steps: bool = False
    """Each of its steps has a span of its own."""
    step_began_ns: int = 0
    """When the last step began (wall clock); kept for sessions with `trace_steps` only."""
    lost_memory_before_step: int = 0
    """Of a session whose agent is not re-executed: what the agent's `step` kept of the steps before
    this one, since the anchor that it came back from, was lost with an earlier attempt. 0: nothing
    was."""
    anchors_waiting: int = 0
    """Anchors that were captured and are not published yet; the session's end waits for them."""
    hears: set[str] = field(default_factory=set)
    """Lanes of earlier attempts whose answers it hears."""
    told_of_anchors: bool = False
    """It was said that one could not be captured."""

    @property
    def raw_id(self) -> bytes:
        """The bytes of the session's id."""
        return self.sender.session_id

    @property
    def waiting_on(self) -> str:
        """For people: what the session waits for."""
        awaiting = self.machine.awaiting
        if awaiting is None:
            return "tick"
        if awaiting == AWAITS_LATE:
            return "reward" if self.awaited()[0] else "tool"
        return "tool" if awaiting == AWAITS_RESULTS else "reward"

    @property
    def has_curriculum(self) -> bool:
        """Whether the session has a curriculum level."""
        return self.request.curriculum_level is not None

    @property
    def reward_lag_steps(self) -> int:
        """How many steps the oldest deferred reward that has not come is behind; 0: none is out."""
        late = self.machine.late
        owed = [] if late is None else late.unanswered_steps()
        return self.machine.steps - owed[0].step if owed else 0

    def awaited(self) -> tuple[list[Stepped], list[Called]]:
        """The steps and the tool turns whose answers the session waits for."""
        machine = self.machine
        if machine.awaiting == AWAITS_LATE and (late := machine.late) is not None:
            return late.unanswered_steps(), late.unanswered_turns()
        if machine.awaiting == AWAITS_RESULTS and (turn := machine.called) is not None:
            return [], [turn]
        return ([] if self.last is None else [self.last]), []

    def turns_asked(self) -> list[Called]:
        """The tool turns of which answers are outstanding, waited for or not."""
        machine = self.machine
        turns = [] if machine.late is None else machine.late.unanswered_turns()
        turn = machine.called
        if turn is not None and turn not in turns:
            turns.append(turn)
        return turns

    def call_deadline_s(self, turn: Called) -> float:
        """How long the slowest call of a turn may take."""
        return max(self.tools[call.name].deadline_s for call in turn.calls)


@dataclass(slots=True)
class Opening:
    """What opening a seat gave: outputs to publish, and the seat unless it is over already."""

    seat: Seat
    started: Started | None = None
    ended: Ended | None = None
    pending: list[Input] = field(default_factory=list)
    anchors: list[Frozen] = field(default_factory=list)
    """Anchors that were taken on the way and that the log lacks."""
    resumed: ResumedCircumstance | None = None
    """Where a session with anchors came back from."""
    lanes_before: list[str] = field(default_factory=list)
    """Lanes of earlier attempts that answers may still go to."""


class Loaded(NamedTuple):
    """A program, and what keeps its sessions apart."""

    program: Program
    interposition: Interposition
    undeclared_uses: str
    """The clocks and generators that packages behind it captured before they were redirected, as
    `module.name` joined by commas: what they give is the process's own."""

    @classmethod
    def of(cls, program: Program) -> Loaded:
        """Find out what a program needs."""
        found = set().union(*(undeclared_uses(code) for code in program.namespaces))
        if found:
            log.warning("real clocks or chance, captured by a package: %s", sorted(found))
        return cls(program, interposition_for(program), ", ".join(sorted(found)))


class Library:
    """Programs and policies by hash, loaded once a worker. Bounded; the oldest go first."""

    def __init__(self, log: LogReader, objects: ObjectStore | None, running: RunningSlot) -> None:
        self._log = log
        self._running = running
        self._objects = objects
        self._programs: OrderedDict[tuple[str, str], Loaded] = OrderedDict()
        self._policies: OrderedDict[str, Any] = OrderedDict()
        self._is_env_reward: OrderedDict[str, bool] = OrderedDict()

    async def _content(self, spec_hash: str, kind: str, tail: Tail) -> bytes:
        with _starting("spec_not_found"):
            return await spec_content(
                self._log,
                self._objects,
                kind,
                spec_hash,
                tail.sequence,
                SPEC_WAIT_S,
                epoch=tail.epoch,
            )

    async def program(self, request: RequestFact, index: int, tail: Tail) -> Loaded:
        """The program of a request. Its import is user code, run in the session's name.

        Raises:
            StartFailed: a spec is missing, or its code does not load.
        """
        key = (request.agent_spec, request.env_spec)
        if key not in self._programs:
            agent = await self._content(request.agent_spec, "agent", tail)
            env = await self._content(request.env_spec, "env", tail)
            if key not in self._programs:
                self._running.enter(index, 0, monotonic_ns())
                try:
                    program = load_program(request.agent_spec, agent, request.env_spec, env)
                except ProgramError as error:
                    raise StartFailed(error.code, str(error)) from error
                except MemoryError:
                    self._running.end_out_of_memory()
                finally:
                    self._running.clear()
                self._programs[key] = Loaded.of(program)
        self._programs.move_to_end(key)
        while len(self._programs) > PROGRAMS_MAX:
            self._programs.popitem(last=False)
        return self._programs[key]

    async def wants_prior(self, spec_hash: str, tail: Tail) -> bool:
        """Whether a reward function needs the observation before the step."""
        if spec_hash not in self._is_env_reward:
            content = await self._content(spec_hash, "reward", tail)
            try:
                document, _ = unseal(content, "reward")
            except SpecError as error:
                raise StartFailed("spec_invalid", f"reward_fn_hash: {error}") from error
            assert isinstance(document, RewardDocument)
            self._is_env_reward[spec_hash] = document.entry == "env"
        self._is_env_reward.move_to_end(spec_hash)
        while len(self._is_env_reward) > REWARD_SPECS_MAX:
            self._is_env_reward.popitem(last=False)
        return not self._is_env_reward[spec_hash]

    def result(self, blob: str) -> bytes:
        """The result of a tool that lies in the object store. Blocks.

        Raises:
            BlobMissing: the store does not have it, or there is none.
            ObjectStoreError: the store is away.
        """
        return blob_content(self._objects, blob, "the result of a tool")

    async def policy(self, version: str, tail: Tail) -> Any:
        """The state of a pinned policy, `name@version`, decoded anew for each session."""
        if version not in self._policies:
            key = keys.policy(*version.split("@", 1))
            row = await self._log.row(SYSTEM_SESSION, key)
            with _starting("policy_not_found"):
                if row is None:
                    await self._log.wait_floor(tail.sequence, SPEC_WAIT_S, epoch=tail.epoch)
                    row = await self._log.row(SYSTEM_SESSION, key)
                if row is None:
                    raise StartFailed("policy_not_found", f"policy {version} is not in the log")
                blob, what = decode(row.fact)["blob"], f"policy {version}"
                content = await asyncio.to_thread(blob_content, self._objects, blob, what)
            self._policies[version] = content
            while len(self._policies) > POLICIES_MAX:
                self._policies.popitem(last=False)
        return decode(self._policies[version])


@contextlib.contextmanager
def _starting(absent_code: str) -> Iterator[None]:
    """What is absent ends the session with this code; while something is away it is handed back."""
    try:
        yield
    except Absent as absent:
        raise StartFailed(absent_code, str(absent)) from absent
    except (LogBehind, ObjectStoreError) as error:
        raise NotNow(str(error)) from error


class Opener:
    """Opens seats."""

    def __init__(self, library: Library, log: LogReader, restart_wait_s: float) -> None:
        self._library = library
        self._log = log
        self._restart_wait_s = restart_wait_s

    async def prepare(
        self, request: RequestFact, placed: PlacedFact, index: int, tail: Tail
    ) -> Seat:
        """Everything before the session's own code runs; `open_seat` runs it.

        Raises:
            StartFailed: with the code that the session ends with.
        """
        loaded = await self._library.program(request, index, tail)
        program = loaded.program
        state = await self._library.policy(request.policy, tail) if request.policy else None
        wants_prior = await self._library.wants_prior(request.reward_fn_hash, tail)
        config = session_config(request, program, policy_state=state, wants_prior=wants_prior)
        return Seat(
            request,
            placed,
            index,
            SessionMachine(program, config, loaded.interposition),
            program.agent.step_deadline_s,
            program.env.observations.inline_bytes_max,
            program.env.observations.above,
            Sender(
                request.session_id.bytes,
                placed.attempt,
                (request.policy or "").encode(),
                request.reward_fn_hash,
                request.lag_steps is not None or request.reward_lag_steps_max is not None,
            ),
            tools={
                tool.name: ToolUse(spec=tool.ref, deadline_s=tool.deadline_s)
                for tool in program.agent.tools
                if tool.name is not None and tool.deadline_s is not None
            },
            calls_max=program.agent.tool_calls_max,
            undeclared_uses=loaded.undeclared_uses,
        )

    async def recorded(self, placed: PlacedFact, tail: Tail) -> Recorded | None:
        """What the log has of an earlier attempt, up to the position of this placement.

        Raises:
            StartFailed: the recorder did not pass the placement in time.
        """
        if placed.attempt == 1:
            return None
        try:
            await self._log.wait_floor(tail.sequence, self._restart_wait_s, epoch=tail.epoch)
        except LogBehind as error:
            raise NotNow(str(error)) from error
        rows = await self._log.rows(placed.session_id, upto=tail.sequence, epoch=tail.epoch)
        try:
            with _starting("blob_not_found"):
                return await asyncio.to_thread(Recorded.from_rows, rows, self._library.result)
        except (RecordedGap, RecordedInvalid) as error:
            raise StartFailed("log_damaged", str(error)) from error


def open_seat(
    seat: Seat, recorded: Recorded | None, loaded: LoadedAnchor | None = None
) -> Generator[int, None, Opening]:
    """Run the session's user code up to the point where it goes live. No I/O.

    Yields each step before it is executed again: it has a deadline of its own, and a worker that
    re-executes a long session has others to step meanwhile.

    Args:
        loaded: an anchor of the record to begin at; without one it begins at step 0.

    Raises:
        NotRestorable: the anchor is of no use. The seat is as it was.
    """
    machine = seat.machine
    if recorded is None or recorded.reset is None:
        yield 0
        output = machine.start()
        if isinstance(output, Ended):
            return Opening(seat, ended=output)
        return Opening(seat, started=output, pending=[] if recorded is None else recorded.inputs)
    yield 0
    at = 0 if loaded is None else loaded.anchor.position
    if machine.determinism == "D0" and (loaded is None or at < len(recorded.steps)):
        return Opening(seat, ended=closing("not_resumable", NOT_RESUMABLE, recorded))
    seat.call_counts = CallCounts(recorded.turns.values())
    if loaded is not None:
        anchor, before = loaded.anchor, recorded.steps[loaded.anchor.position - 1]
        machine = restored(machine, loaded.blob, anchor.anchor_id, before.fact, before.chain)
    began_at = machine.steps
    # An agent that is not asked again is not what it was: its state now is no anchor.
    anchors = Compared(recorded.anchors, keep=machine.deterministic)
    divergence = yield from rerun_steps(machine, recorded, anchors)
    if divergence is not None:
        if loaded is not None:
            # The log may be right and the anchor wrong: an agent whose state is not all there.
            machine.close()
            raise NotRestorable(told_of(divergence))
        return Opening(seat, ended=diverged(divergence, recorded))
    seat.machine = machine
    seat.last = machine.last
    if not machine.deterministic and machine.steps > began_at:
        seat.lost_memory_before_step = machine.steps
    pending = undelivered(recorded, machine)
    # What is late may have been asked by any attempt; all else by the last one alone.
    lanes = recorded.lanes if machine.late is not None else []
    return Opening(
        seat,
        ended=machine.ended,
        pending=pending,
        anchors=anchors.missing,
        lanes_before=[lane for lane in lanes if lane != seat.placed.lane],
    )


def diverged(divergence: Divergence, recorded: Recorded) -> Ended:
    """The end of a session whose re-execution gave something else than the log has."""
    return closing("diverged_on_restart", told_of(divergence), recorded)


def told_of(divergence: Divergence) -> str:
    """A divergence, for people."""
    return (
        f"re-execution after a restart differs from the log at step {divergence.step}, field "
        f"{divergence.field}: expected {divergence.expected!r}, got {divergence.actual!r}"
    )


def closing(code: str, message: str, recorded: Recorded | None) -> Ended:
    """A failure that closes the log as it stands: what the log has was published and counts."""
    recorded = recorded or Recorded()
    steps = len(recorded.steps)
    chain = recorded.steps[-1].chain if steps else recorded.chain_0
    episodes = sum(any(decode(step.fact)[_DONE]) for step in recorded.steps)
    inputs = encode([])
    end = chain_end(chain, "failed", code, steps, episodes, inputs)
    return Ended("failed", code, steps, episodes, inputs, end, message)


def unpublishable(seat: Seat, message: str) -> Ended:
    """The end of a session whose last step cannot be published, and so did not happen."""
    last, machine = seat.last, seat.machine
    assert last is not None
    steps, episodes = last.step, machine.episodes - (last.terminated or last.truncated)
    inputs = encode([])
    chain = chain_end(seat.chain_before, "failed", UNPUBLISHABLE, steps, episodes, inputs)
    return Ended("failed", UNPUBLISHABLE, steps, episodes, inputs, chain, message)


def uncallable(seat: Seat, message: str) -> Ended:
    """The end of a session whose tool calls cannot be published. The steps before them count."""
    return cut_short(seat, UNPUBLISHABLE, message)


def cut_short(seat: Seat, code: str, message: str) -> Ended:
    """The end of a session that cannot go on from where it stands. Its steps count."""
    machine, inputs = seat.machine, encode([])
    steps, episodes = machine.steps, machine.episodes
    chain = chain_end(machine.chain, "failed", code, steps, episodes, inputs)
    return Ended("failed", code, steps, episodes, inputs, chain, message)


_DONE = slice(STEP_FIELDS.index("terminated"), STEP_FIELDS.index("truncated") + 1)
