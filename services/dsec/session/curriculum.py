"""The curriculum level of one session, and a change of it that waits for the next episode.

A change comes when the clock says so, and is delivered at the next reset, never in the midst of an
episode. The step that ends the episode names it, as the last of its inputs: the reset that it is
for is part of that step. Of several that wait the last one is delivered and the others are not, so
what happens at the border depends on which came, and not on their order.

Pure; `SessionMachine` runs the user code.
"""

from __future__ import annotations

from typing import Any

from dsec.session.io import Input
from dsec_contracts.canonical import decode

OPTION = "curriculum_level"
"""What the level is called wherever user code meets it."""


class Curriculum:
    """Which level each episode has."""

    __slots__ = ("_levels", "_ordinal", "_waiting")

    def __init__(self, level: int) -> None:
        self._ordinal = 0
        """Of the change that was delivered last."""
        self._levels = [(0, level)]
        """(first episode, level), the newest last."""
        self._waiting: Input | None = None

    @property
    def level(self) -> int:
        """Of the newest episode."""
        return self._levels[-1][1]

    def of(self, episode: int) -> int:
        """The level of an episode that the agent is still told of."""
        return next(level for first, level in reversed(self._levels) if first <= episode)

    def offer(self, given: Input) -> None:
        """Have a change wait for the next episode. A stale or repeated one changes nothing."""
        newest = self._ordinal if self._waiting is None else self._waiting.ordinal
        if given.ordinal > newest:
            self._waiting = given

    def begin(self, episode: int, told_from: int) -> Input | None:
        """An episode begins: the change that it is reset with, or None.

        Args:
            told_from: the oldest episode that the agent will still be told of.
        """
        given, self._waiting = self._waiting, None
        if given is None:
            return None
        self._ordinal = given.ordinal
        self._levels.append((episode, decode(given.fact)[1]))
        while len(self._levels) > 1 and self._levels[1][0] <= told_from:
            del self._levels[0]
        return given

    # -- in an anchor --------------------------------------------------------------------------

    def position(self) -> list[Any]:
        """Where it stands. A change that waits is left out: no output names it, so a restart gives
        it again from the log."""
        return [self._ordinal, [list(one) for one in self._levels]]

    def restore(self, position: list[Any]) -> None:
        """Take back what `position` gave."""
        self._ordinal, levels = position
        self._levels = [(episode, level) for episode, level in levels]
