"""The first difference of two sessions, by bisection over their chain hashes.

A chain hash stands for everything before it, so two sessions that agree at a step agree up to it,
and the first step at which they do not is found in `2 log2(n)` rows, however long the logs are.
What stands in a row is compared only there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from dsec.session import log_row
from dsec.session.log_row import RecordedGap, Row, ended_fact, fact_bytes, fact_map, position
from dsec_contracts import keys
from dsec_contracts.canonical import CanonicalError, decode, encode
from dsec_contracts.step import STEP_FIELDS

_RESET_FIELDS = ("state_hash", "observation_hash", "info")


class StepSource(Protocol):
    """Where the rows of one session are read, one by one."""

    async def start(self) -> Row | None:
        """The row of its start."""

    async def last_step(self) -> int | None:
        """The highest step that is logged."""

    async def row(self, step: int) -> Row | None:
        """The row of a step."""

    async def end(self) -> Row | None:
        """The row of its end."""


class RowsSource:
    """A `StepSource` over rows that are at hand."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._by_key: dict[str, Row] = {}
        for row in sorted(rows, key=position):
            self._by_key.setdefault(row.key, row)
        steps = [r.step for r in self._by_key.values() if r.kind == log_row.STEPPED]
        self._last = max((step for step in steps if step is not None), default=None)

    async def start(self) -> Row | None:
        """See `StepSource`."""
        return self._by_key.get(keys.STARTED)

    async def last_step(self) -> int | None:
        """See `StepSource`."""
        return self._last

    async def row(self, step: int) -> Row | None:
        """See `StepSource`."""
        return self._by_key.get(keys.step(step))

    async def end(self) -> Row | None:
        """See `StepSource`."""
        return self._by_key.get(keys.ENDED)


class Reader(Protocol):
    """What `LogSource` needs of the log's reader."""

    async def row(self, session_id: UUID, key: str) -> Row | None: ...
    async def last_step(self, session_id: UUID) -> int | None: ...


class LogSource:
    """A `StepSource` over the log in the database."""

    def __init__(self, reader: Reader, session_id: UUID) -> None:
        self._reader = reader
        self._session_id = session_id

    async def start(self) -> Row | None:
        """See `StepSource`."""
        return await self._reader.row(self._session_id, keys.STARTED)

    async def last_step(self) -> int | None:
        """See `StepSource`."""
        return await self._reader.last_step(self._session_id)

    async def row(self, step: int) -> Row | None:
        """See `StepSource`."""
        return await self._reader.row(self._session_id, keys.step(step))

    async def end(self) -> Row | None:
        """See `StepSource`."""
        return await self._reader.row(self._session_id, keys.ENDED)


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two sessions part.

    `step` is None for the start (`started`, `reset.state_hash`, `reset.observation_hash`,
    `reset.info`, `chain_0`) and the end (`ended`, `status`, `code`, `steps`, `episodes`,
    `inputs`, `chain`). For a step `field` is one of `STEP_FIELDS`, `chain` where the facts are
    equal and a recorded hash is not theirs, or `recorded` where only one session has the step.
    """

    step: int | None
    field: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """Whether two sessions are equal; if not, where they part first."""

    first_difference: FirstDifference | None
    rows_read: int

    @property
    def equal(self) -> bool:
        """Whether there is no difference at all."""
        return self.first_difference is None


async def diff(a: StepSource, b: StepSource) -> Difference:
    """Compare two sessions. Reads at most `2 log2(n) + 10` rows, n the steps they both have.

    Raises:
        RecordedGap: a step is missing in a log that has a later one.
    """
    search = _Search(a, b)
    found = await search.run()
    return Difference(found, search.rows_read)


class _Search:
    def __init__(self, a: StepSource, b: StepSource) -> None:
        self._a, self._b = a, b
        self.rows_read = 0

    async def run(self) -> FirstDifference | None:
        starts = await self._a.start(), await self._b.start()
        self._count(*starts)
        found = _differing_start(*starts)
        if found is not None:
            return found
        steps_a, steps_b = await _length(self._a), await _length(self._b)
        common = min(steps_a, steps_b)
        if common:
            found = await self._first_step(common - 1)
            if found is not None:
                return found
        if steps_a != steps_b:
            return FirstDifference(common, "recorded", steps_a > common, steps_b > common)
        ends = await self._a.end(), await self._b.end()
        self._count(*ends)
        return _differing_end(*ends)

    async def _first_step(self, last: int) -> FirstDifference | None:
        """The first differing step up to `last`, the last one that both have."""
        pair = await self._pair(last)
        if _same_chain(*pair):
            return None
        equal, unequal = -1, last
        while unequal - equal > 1:
            middle = (equal + unequal) // 2
            rows = await self._pair(middle)
            if _same_chain(*rows):
                equal = middle
            else:
                unequal, pair = middle, rows
        return _differing_step(unequal, *pair)

    async def _pair(self, step: int) -> tuple[Row, Row]:
        one, other = await self._a.row(step), await self._b.row(step)
        self._count(one, other)
        if one is None or other is None:
            raise RecordedGap(step, step + 1)
        return one, other

    def _count(self, *rows: Row | None) -> None:
        self.rows_read += sum(row is not None for row in rows)


async def _length(source: StepSource) -> int:
    last = await source.last_step()
    return 0 if last is None else last + 1


def _same_chain(a: Row, b: Row) -> bool:
    return bytes(a.chain or b"") == bytes(b.chain or b"")


def _differing_start(a: Row | None, b: Row | None) -> FirstDifference | None:
    if a is None or b is None:
        return None if a is b else FirstDifference(None, "started", a is not None, b is not None)
    if _same_chain(a, b):
        return None
    one, other = (_value(fact_bytes(fact_map(row), "reset")) for row in (a, b))
    name, x, y = _first_unequal(_RESET_FIELDS, one, other)
    if not name:
        return FirstDifference(None, "chain_0", a.chain, b.chain)
    return FirstDifference(None, f"reset.{name}", x, y)


def _differing_step(step: int, a: Row, b: Row) -> FirstDifference:
    name, x, y = _first_unequal(STEP_FIELDS, _value(bytes(a.fact)), _value(bytes(b.fact)))
    if not name:
        return FirstDifference(step, "chain", a.chain, b.chain)
    return FirstDifference(step, name, x, y)


def _differing_end(a: Row | None, b: Row | None) -> FirstDifference | None:
    if a is None or b is None:
        return None if a is b else FirstDifference(None, "ended", a is not None, b is not None)
    one, other = ended_fact(a), ended_fact(b)
    for name, x, y in zip(one._fields, one, other, strict=True):
        if x != y:
            if name == "inputs":
                return FirstDifference(None, name, _value(one.inputs), _value(other.inputs))
            return FirstDifference(None, name, x, y)
    return None


def _first_unequal(names: tuple[str, ...], a: Any, b: Any) -> tuple[str, Any, Any]:
    """The first field whose canonical bytes differ; an empty name where none does."""
    for value in (a, b):
        if not isinstance(value, list) or len(value) != len(names):
            return "fact", a, b
    for name, x, y in zip(names, a, b, strict=True):
        if encode(x) != encode(y):
            return name, x, y
    return "", None, None


def _value(data: bytes) -> Any:
    try:
        return decode(data)
    except CanonicalError:
        return data
