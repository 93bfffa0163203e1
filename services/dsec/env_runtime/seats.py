"""A seat: one session on this worker, with what the lanes need to step it and to say what it waits
for.

`opening.py` makes seats, a lane steps what sits in them, `ends.py` says how they end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dsec.env_runtime.call_counts import CallCounts
from dsec.env_runtime.packing import Sender
from dsec.session.io import AWAITS_LATE, AWAITS_RESULTS, Called, Stepped
from dsec.session.machine import SessionMachine
from dsec_contracts.session import PlacedFact, RequestFact
from dsec_contracts.tool import ToolUse


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
