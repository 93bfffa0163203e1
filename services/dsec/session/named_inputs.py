"""The recorded inputs that recorded outputs name: these and no others were delivered, in order."""

from __future__ import annotations

from typing import Any

from dsec.session.chain import digest16
from dsec.session.io import Input
from dsec_contracts.canonical import decode
from dsec_contracts.step import STEP_FIELDS

_INPUTS = STEP_FIELDS.index("inputs")
_HEAD_BYTES = {24: 2, 25: 3, 26: 5, 27: 9}


class NotInLog(Exception):
    """An output names an input that the log does not have, or not with this hash."""

    def __init__(self, expected: list[Any], actual: list[Any] | None) -> None:
        super().__init__(expected)
        self.expected = expected
        self.actual = actual


class NamedInputs:
    """Finds the inputs that outputs name. Mostly it is the next one, and no fact is decoded."""

    __slots__ = ("_by_name", "_next", "inputs", "taken")

    def __init__(self, inputs: list[Input]) -> None:
        self.inputs = inputs
        self.taken: set[int] = set()
        self._next = 0
        self._by_name: dict[tuple[str, int], int] | None = None

    def of_step(self, fact: bytes) -> list[Input]:
        """The inputs that a step names.

        Raises:
            NotInLog: one is not there, or not with this hash.
            ValueError, TypeError, IndexError: the fact is none.
        """
        at = 1
        for _ in range(_INPUTS):  # step and episode: the items before the inputs
            at += _HEAD_BYTES.get(fact[at] & 31, 1)
        if fact[at] == 0x80:
            return []
        if self._next < len(self.inputs):
            given = self.inputs[self._next]
            if fact[at] == 0x81 and fact.startswith(given.name(), at + 1):
                self.taken.add(self._next)
                self._next += 1
                return [given]
        return self.of_names(decode(fact)[_INPUTS])

    def of_names(self, names: list[Any]) -> list[Input]:
        """The inputs of `[[kind, ordinal, hash], ...]`."""
        if self._by_name is None:
            self._by_name = {(g.kind, g.ordinal): n for n, g in enumerate(self.inputs)}
        result = []
        for kind, ordinal, digest in names:
            n = self._by_name.get((kind, ordinal))
            if n is None or digest16(self.inputs[n].fact) != digest:
                actual = None if n is None else [kind, ordinal, digest16(self.inputs[n].fact)]
                raise NotInLog([kind, ordinal, digest], actual)
            self.taken.add(n)
            self._next = n + 1
            result.append(self.inputs[n])
        return result
