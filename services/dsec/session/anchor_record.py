"""Anchors as the log has them: what a re-execution compares, and what a restart may load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from uuid import UUID

from dsec.session.anchors import FOLD_VERSION, NotCaptured, Taken
from dsec.session.log_row import Row, circumstance_map, fact_bytes, fact_map
from dsec.session.raised import is_ours, told_in_a_line
from dsec_contracts.anchor import AnchorCapturedFact


@dataclass(frozen=True, slots=True)
class RecordedAnchor:
    """An anchor of the log. `blob` is the name of its bytes if they are stored, else None."""

    position: int
    fact: tuple[Any, ...]
    blob: str | None = None
    lost: str = ""
    """Why it has no blob and will have none."""

    @property
    def anchor_id(self) -> str:
        """Its id."""
        return str(self.fact[1])


class Frozen(NamedTuple):
    """An anchor that is on its way to the log, with its bytes or why there are none."""

    taken: Taken
    blob: bytes
    error: str


def frozen(taken: Taken) -> Frozen:
    """Capture the state of an anchor that is being taken."""
    try:
        return Frozen(taken, taken.freeze(), "")
    except MemoryError:
        raise
    except BaseException as error:
        if not is_ours(error):
            return Frozen(taken, b"", told_in_a_line(error))
        if isinstance(error, NotCaptured):
            return Frozen(taken, b"", str(error))
        raise


def captured_fact(session_id: UUID, taken: Taken) -> AnchorCapturedFact:
    """The fact of an anchor."""
    return AnchorCapturedFact(
        session_id=session_id,
        position=taken.position,
        anchor_id=taken.anchor_id,
        content=taken.content,
        covers_agent=taken.covers_agent,
        tags=list(taken.tags),
        parents=list(taken.parents),
        fold_version=FOLD_VERSION,
    )


def captured_of(row: Row) -> RecordedAnchor:
    """What a row of kind `anchor.captured` says.

    Raises:
        ValueError, KeyError: the fact is not that of an anchor.
    """
    told = fact_map(row)
    fact = (
        int(told["position"]),
        told["anchor_id"],
        fact_bytes(told, "content"),
        bool(told["covers_agent"]),
        tuple(told.get("tags", ())),
        tuple(told.get("parents", ())),
    )
    return RecordedAnchor(fact[0], fact)


def with_outcome(anchor: RecordedAnchor, outcome: Row, captured: Row) -> RecordedAnchor:
    """An anchor with what became of its blob. The bytes that were stored are those that were
    captured, or they are not this anchor's.

    Raises:
        ValueError, KeyError: the fact is not that of an outcome.
    """
    told = fact_map(outcome)
    if told["anchor_id"] != anchor.anchor_id:
        return anchor
    if "code" in told:
        return replace(anchor, lost=str(told["code"]))
    blob = str(told["blob"])
    return replace(anchor, blob=blob) if circumstance_map(captured).get("blob") == blob else anchor


class Compared:
    """What a re-execution does with the anchors that it takes: those that the log has are compared,
    and of the others `missing` keeps what has to be published, if there is anybody to do it."""

    def __init__(self, recorded: Mapping[int, RecordedAnchor], *, keep: bool) -> None:
        self._recorded = recorded
        self._keep = keep
        self._seen: dict[int, Taken] = {}
        self.missing: list[Frozen] = []

    def __call__(self, taken: Taken) -> None:
        """An anchor is being taken."""
        if taken.position in self._recorded:
            self._seen[taken.position] = taken
        elif self._keep:
            self.missing.append(frozen(taken))

    def difference(self, position: int) -> tuple[Any, Any] | None:
        """What the log has at a position and what came out, if these differ."""
        recorded = self._recorded.get(position)
        taken = self._seen.pop(position, None)
        if recorded is None or (taken is not None and taken.fact == recorded.fact):
            return None
        return list(recorded.fact), None if taken is None else list(taken.fact)
