"""Opening a seat: from a session's placement to the point where a lane steps it.

A first attempt starts from nothing. A later one comes back from the log: it waits until the
recorder has passed the position of its own placement, reads the log up to there and nothing else,
re-executes and compares, and then goes on live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, field

from dsec.env_runtime.call_counts import CallCounts
from dsec.env_runtime.ends import closing, diverged, told_of
from dsec.env_runtime.library import Library, NotNow, StartFailed, Tail, starting
from dsec.env_runtime.loading import Loaded, Search
from dsec.env_runtime.packing import Sender
from dsec.env_runtime.running import RunningSlot
from dsec.env_runtime.seats import Seat
from dsec.env_runtime.slices import Slices
from dsec.platform.log import LogBehind, LogReader
from dsec.platform.objects import ObjectStore
from dsec.session.anchor_record import Compared, Frozen
from dsec.session.anchor_restore import NotRestorable, restored
from dsec.session.io import Ended, Input, Started
from dsec.session.log_row import RecordedGap
from dsec.session.machine import SessionMachine
from dsec.session.program import session_config
from dsec.session.recorded import Recorded, RecordedInvalid
from dsec.session.rerun import rerun_steps, undelivered
from dsec_contracts.session import PlacedFact, RequestFact, ResumedCircumstance
from dsec_contracts.tool import ToolUse

NOT_RESUMABLE = (
    "the environment is not executed again (deterministic_mode: false), and no anchor right behind "
    "the last recorded step could be used"
)


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


class Opener:
    """Opens the seats of one worker."""

    def __init__(
        self,
        worker: str,
        library: Library,
        log: LogReader,
        objects: ObjectStore | None,
        running: RunningSlot,
        slices: Slices,
        restart_wait_s: float,
    ) -> None:
        self._worker = worker
        self._library = library
        self._log = log
        self._objects = objects
        self._running = running
        self._slices = slices
        self._restart_wait_s = restart_wait_s
        self.anchors_loaded = 0
        self.anchors_missed = 0

    async def open(
        self, request: RequestFact, placed: PlacedFact, index: int, tail: Tail
    ) -> Opening:
        """Open a seat: read what there is, and run the session up to the log's tail.

        Args:
            index: of the seat, whose code the session's is while it runs.

        Raises:
            StartFailed: with the code that the session ends with.
            NotNow, LogUnavailable: what it needs is away.
        """
        recorded = await self._recorded(placed, tail)
        try:
            seat = await self._prepare(request, placed, index, tail)
        except StartFailed as failed:
            failed.recorded = recorded
            raise
        self._running.assign(index, placed.session_id, seat.step_deadline_s)
        try:
            if recorded is None or not recorded.anchors:
                return await self._slices.executed(open_seat(seat, recorded), index)
            return await self._from_anchor(seat, recorded, index)
        except RecordedGap as gap:
            raise StartFailed("log_damaged", str(gap)) from gap

    async def _from_anchor(self, seat: Seat, recorded: Recorded, index: int) -> Opening:
        """From the newest anchor that is of use, or from step 0."""
        search = Search(recorded, self._objects)
        if seat.machine.determinism == "D0":
            search.position_min = len(recorded.steps)
        opening = None
        while opening is None:
            opening = await self._at(await search.next(), search, seat, index)
        return opening

    async def _at(
        self, loaded: Loaded | None, search: Search, seat: Seat, index: int
    ) -> Opening | None:
        """From this anchor, or, without one, from step 0. None: the anchor is of no use."""
        try:
            work = open_seat(seat, search.recorded, loaded)
            opening = await self._slices.executed(work, index)
        except NotRestorable as error:
            assert loaded is not None
            search.miss(loaded.anchor, "not_restorable", str(error))
            return None
        self.anchors_loaded += loaded is not None
        self.anchors_missed += len(search.misses)
        if opening.ended is not None and opening.ended.code == "not_resumable":
            opening.ended = search.explained(opening.ended)
            return opening
        opening.resumed = search.resumed(self._worker, loaded)
        return opening

    async def _prepare(
        self, request: RequestFact, placed: PlacedFact, index: int, tail: Tail
    ) -> Seat:
        """Everything before the session's own code runs; `open_seat` runs it.

        Raises:
            StartFailed: with the code that the session ends with.
        """
        loaded = await self._library.program(request, index, tail)
        program = loaded.program
        state = await self._library.policy(request.policy, tail) if request.policy else None
        rewarding = await self._library.rewarding(request.reward_fn_hash, tail)
        config = session_config(
            request,
            program,
            policy_state=state,
            wants_prior=rewarding.wants_prior,
            reward_per_episode=rewarding.per_episode,
        )
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

    async def _recorded(self, placed: PlacedFact, tail: Tail) -> Recorded | None:
        """What the log has of an earlier attempt, up to the position of this placement.

        Raises:
            NotNow: the recorder did not pass the placement in time.
            StartFailed: the log is damaged, or lacks what it names.
        """
        if placed.attempt == 1:
            return None
        try:
            await self._log.wait_floor(tail.sequence, self._restart_wait_s, epoch=tail.epoch)
        except LogBehind as error:
            raise NotNow(str(error)) from error
        rows = await self._log.rows(placed.session_id, upto=tail.sequence, epoch=tail.epoch)
        try:
            with starting("blob_not_found"):
                return await asyncio.to_thread(Recorded.from_rows, rows, self._library.result)
        except (RecordedGap, RecordedInvalid) as error:
            raise StartFailed("log_damaged", str(error)) from error


def open_seat(
    seat: Seat, recorded: Recorded | None, loaded: Loaded | None = None
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
