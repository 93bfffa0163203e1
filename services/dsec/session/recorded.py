"""What the log has of one session, as a re-execution needs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dsec.session import log_row
from dsec.session.anchor_record import RecordedAnchor, captured_of, with_outcome
from dsec.session.io import Called, Ended, Input
from dsec.session.log_row import RecordedGap, Row, fact_bytes, fact_map, position
from dsec.session.row_io import GetBlob, ended_of, input_of, turn_of
from dsec_contracts.canonical import decode
from dsec_contracts.step import STEP_FIELDS

_ACTION = STEP_FIELDS.index("action")


class RecordedInvalid(ValueError):
    """A fact of the log cannot be read. Names its key."""


@dataclass(slots=True)
class RecordedStep:
    """A step as the log has it."""

    step: int
    fact: bytes
    chain: bytes


@dataclass(slots=True)
class Recorded:
    """What the log has of one session, as a re-execution needs it.

    `reset` is canonical `[state_hash, observation_hash, info]`, None where the session never
    started; `steps` run from 0 without a gap; `inputs` are in the order of their positions, the
    first of each kind and ordinal.
    """

    reset: bytes | None = None
    chain_0: bytes | None = None
    steps: list[RecordedStep] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    ended: Ended | None = None
    turns: dict[tuple[int, int], Called] = field(default_factory=dict)
    """Tool calls by step and turn."""
    anchors: dict[int, RecordedAnchor] = field(default_factory=dict)
    """By position."""
    lanes: list[str] = field(default_factory=list)
    """Where it was placed, in order: answers to what it asked then go there."""

    @classmethod
    def from_rows(cls, rows: Iterable[Row], get_blob: GetBlob | None = None) -> Recorded:
        """Read the rows of one session, in any order and however often repeated.

        Args:
            get_blob: gives the bytes of results that lie in the object store; what it raises
                leaves this.

        Raises:
            RecordedGap: a step is missing.
            RecordedInvalid: a fact is not what its kind says.
        """
        ordered = sorted(rows, key=position)
        recorded = cls()
        steps: dict[int, RecordedStep] = {}
        inputs: dict[tuple[str, int], Input] = {}
        for row in ordered:
            if row.kind == log_row.STEPPED:
                assert row.step is not None
                if row.step not in steps:
                    fact, chain = bytes(row.fact), bytes(row.chain or b"")
                    steps[row.step] = RecordedStep(row.step, fact, chain)
                continue
            try:
                recorded._take(row, inputs, get_blob)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise RecordedInvalid(f"{row.key} cannot be read: {error!r}") from error
        recorded.steps = [steps[n] for n in sorted(steps)]
        recorded.inputs = list(inputs.values())
        recorded._take_anchors(ordered)
        for n, step in enumerate(recorded.steps):
            if step.step != n:
                raise RecordedGap(n, step.step)
        return recorded

    def _take(
        self, row: Row, inputs: dict[tuple[str, int], Input], get_blob: GetBlob | None
    ) -> None:
        if row.kind == log_row.STARTED and self.reset is None:
            fact = fact_map(row)
            self.reset, self.chain_0 = fact_bytes(fact, "reset"), fact_bytes(fact, "chain")
        elif row.kind == log_row.ENDED and self.ended is None:
            self.ended = ended_of(row)
        elif row.kind == log_row.PLACED:
            if (lane := str(fact_map(row)["lane"])) not in self.lanes:
                self.lanes.append(lane)
        elif row.kind in log_row.ANCHORS:
            pass  # taken together, since each has two rows
        elif row.kind == log_row.TOOL_CALLED:
            turn = turn_of(row)
            self.turns.setdefault((turn.step, turn.turn), turn)
        else:
            given = input_of(row, get_blob)
            if given is not None:
                inputs.setdefault((given.kind, given.ordinal), given)

    def _take_anchors(self, ordered: list[Row]) -> None:
        captured: dict[int, Row] = {}
        for row in ordered:
            if row.kind not in log_row.ANCHORS:
                continue
            try:
                if row.kind == log_row.ANCHOR_CAPTURED:
                    anchor = captured_of(row)
                    self.anchors.setdefault(anchor.position, anchor)
                    captured.setdefault(anchor.position, row)
                elif (at := int(fact_map(row)["position"])) in captured:
                    # The first outcome counts. No anchor is stored before it is captured.
                    anchor = self.anchors[at]
                    if anchor.blob is None and not anchor.lost:
                        self.anchors[at] = with_outcome(anchor, row, captured[at])
            except (ValueError, KeyError, TypeError) as error:
                raise RecordedInvalid(f"{row.key} cannot be read: {error!r}") from error

    def decision(self, step: int) -> dict[str, Any]:
        """What the agent decided at a recorded step."""
        return {"action": decode(self.steps[step].fact)[_ACTION]}
