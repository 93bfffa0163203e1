"""A row of the log, as the pure parts see it: one fact, its key and its place in the stream.

`LogRow` is what the database's reader gives and what an in-memory run makes; `Row` is the part of
its shape that folds and re-executions use, so that any other reader's rows fit too. The facts of
cold events are canonical maps in which bytes appear as base64 text; they are read here.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol
from uuid import UUID

from dsec_contracts.canonical import decode

STARTED = "session.started"
STEPPED = "session.stepped"
ENDED = "session.ended"
PLACED = "session.placed"
REQUESTED = "session.requested"
CANCEL_REQUESTED = "session.cancel_requested"
REWARD_SCORED = "reward.scored"
REWARD_MISSING = "reward.missing"
REWARD_DEFERRED = "reward.deferred"
TOOL_CALLED = "tool.called"
TOOL_RETURNED = "tool.returned"
TOOL_FAILED = "tool.failed"
CURRICULUM_CHANGED = "curriculum.changed"
ANCHOR_CAPTURED = "anchor.captured"
ANCHOR_STORED = "anchor.stored"
ANCHOR_LOST = "anchor.lost"
ANCHORS = frozenset((ANCHOR_CAPTURED, ANCHOR_STORED, ANCHOR_LOST))


class LogRow(NamedTuple):
    """One row of the log. `position` orders rows of different keys; the key makes it the same row.

    A named tuple: it is made once a row read, and costs a seventh of a frozen dataclass.
    """

    session_id: UUID
    key: str
    kind: str
    version: int
    epoch: int
    sequence: int
    index: int  # type: ignore[assignment]  # the column, which hides tuple.index
    step: int | None = None
    episode: int | None = None
    attempt: int | None = None
    value: float | None = None
    terminated: bool | None = None
    truncated: bool | None = None
    chain: bytes | None = None
    fact: bytes = b""
    observation: bytes | None = None
    reset_observation: bytes | None = None
    extras: bytes | None = None
    policy: str | None = None
    cause: str | None = None
    circumstance: Any = None
    event_id: str = ""
    event_time: datetime | None = None

    @property
    def position(self) -> tuple[int, int, int]:
        """(epoch, sequence, index): the order of the log."""
        return self.epoch, self.sequence, self.index


class Row(Protocol):
    """What folds and re-executions read of a row."""

    @property
    def key(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def step(self) -> int | None: ...
    @property
    def episode(self) -> int | None: ...
    @property
    def attempt(self) -> int | None: ...
    @property
    def value(self) -> float | None: ...
    @property
    def terminated(self) -> bool | None: ...
    @property
    def truncated(self) -> bool | None: ...
    @property
    def chain(self) -> bytes | None: ...
    @property
    def fact(self) -> bytes: ...
    @property
    def observation(self) -> bytes | None: ...
    @property
    def reset_observation(self) -> bytes | None: ...
    @property
    def extras(self) -> bytes | None: ...
    @property
    def circumstance(self) -> Any: ...


class RecordedGap(ValueError):
    """The log lacks a step that it must have. Nothing can be said about what follows."""

    def __init__(self, step: int, next_step: int | None = None) -> None:
        found = "the session ended after it" if next_step is None else f"step {next_step} is there"
        super().__init__(f"step {step} is not in the log, although {found}")
        self.step = step


def position(row: Row) -> tuple[int, int, int]:
    """Where a row stands among all rows."""
    return row.epoch, row.sequence, row.index


def fact_map(row: Row) -> dict[str, Any]:
    """The fact of a cold event, by the names of its model.

    Raises:
        ValueError: the fact is no canonical map.
    """
    value = decode(bytes(row.fact))
    if not isinstance(value, dict):
        raise ValueError(f"the fact of {row.key} is no map")
    return value


def fact_bytes(fact: dict[str, Any], name: str) -> bytes:
    """A field of bytes, which a cold fact holds as base64 text.

    Raises:
        ValueError: it is something else.
    """
    text = fact.get(name, "")
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise ValueError(f"{name} is no base64 text")
    return urlsafe_b64decode(text.replace("+", "-").replace("/", "_"))


class EndedFact(NamedTuple):
    """The fact of an end, without the id."""

    status: Literal["completed", "failed", "cancelled"]
    code: str
    steps: int
    episodes: int
    inputs: bytes
    chain: bytes


def ended_fact(row: Row) -> EndedFact:
    """What a row of kind `session.ended` says.

    Raises:
        ValueError, KeyError: the fact is not that of an end.
    """
    fact = fact_map(row)
    return EndedFact(
        fact["status"],
        fact["code"],
        int(fact["steps"]),
        int(fact["episodes"]),
        fact_bytes(fact, "inputs"),
        fact_bytes(fact, "chain"),
    )


def circumstance_map(row: Row) -> dict[str, Any]:
    """The circumstance, whether its reader gave JSON or what is in it. Empty for none."""
    given = row.circumstance
    if isinstance(given, (str, bytes)):
        given = json.loads(given)
    return given if isinstance(given, dict) else {}


def observation_behind(row: Row) -> bytes:
    """The recorded observation that the step after a row begins with: that of the reset, where a
    new episode follows. Empty where none is recorded."""
    return bytes(row.reset_observation or row.observation or b"")
