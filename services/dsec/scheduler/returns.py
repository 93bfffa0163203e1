"""The returns of an agent's episodes at a curriculum level, and where it has mastered the level.

Episodes count in the order of their last steps in the log, in whatever order they are read, and the
level is judged after each of them. So what is found follows from the log alone: neither how many
were read at once nor which scheduler read them makes a difference. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import NamedTuple
from uuid import UUID

from dsec_contracts import keys

WINDOWS_MAX = 10_000
"""Pairs of agent and level whose returns are remembered; those that had none for longest go first.
"""
ONE = 1 << 53
"""A full success, as an integer: sums of these are exact in whatever order they are made."""

At = tuple[int, int]
"""Where in the log a row is: the position of its message, as one integer, and its index there."""
Place = tuple[str, int]
"""An agent and a level."""


class Episode(NamedTuple):
    """A finished episode, all of whose rewards are known."""

    at: At
    """Of its last step."""
    value: float
    """Its return: the sum of its rewards."""
    session_id: UUID
    step: int
    """Its last."""


class Mastery(NamedTuple):
    """An episode with which the mean success of the last ones reached the threshold."""

    sequence: int
    episode: Episode
    mean: float

    @property
    def cause(self) -> str:
        """The key of the episode's last step."""
        return keys.of(self.episode.session_id, keys.step(self.episode.step))


class Window:
    """The last episodes of an agent at a level: twice as many as a mean is taken of, so that one
    that is read late changes what was said of those behind it."""

    def __init__(self, episodes_n: int, threshold: float, target: float) -> None:
        self._n = episodes_n
        self._threshold = threshold
        self._target = target
        self.kept_max = 2 * episodes_n
        self.episodes: list[Episode] = []
        self._masteries: list[Mastery] = []
        self._not_judged = 0

    def add(self, episode: Episode) -> None:
        """Take an episode. One that is known, or older than all of as many as are kept, changes
        nothing."""
        if self._not_judged == self._n:  # as many as surely have all before them here
            self._judge()
        place = bisect_left(self.episodes, episode.at, key=_at)
        if place == 0 and len(self.episodes) == self.kept_max:
            return
        if place < len(self.episodes) and self.episodes[place].at == episode.at:
            return
        self.episodes.insert(place, episode)
        del self.episodes[: -self.kept_max]
        self._not_judged += 1

    def only_newer(self, at: tuple[float, int]) -> bool:
        """Whether nothing that is older than `at` can come in."""
        return len(self.episodes) == self.kept_max and self.episodes[0].at > at

    def mastered(self, since: int) -> Mastery | None:
        """The first episode behind a position with which the level was mastered; where there is
        none, the newest of all if the level is mastered with it."""
        if self._not_judged:
            self._judge()
        found = self._masteries
        first = bisect_right(found, since, key=_sequence)
        if first < len(found):
            return found[first]
        return found[-1] if found and found[-1].episode is self.episodes[-1] else None

    def _judge(self) -> None:
        self._not_judged = 0
        if len(self.episodes) < self._n:
            return
        successes = [self._success(episode.value) for episode in self.episodes]
        total = sum(successes[: self._n - 1])
        first = self.episodes[self._n - 1].at
        found = [one for one in self._masteries if one.episode.at < first]
        for last in range(self._n - 1, len(successes)):
            total += successes[last]
            mean = total / (self._n * ONE)
            if mean >= self._threshold:
                episode = self.episodes[last]
                found.append(Mastery(episode.at[0], episode, mean))
            total -= successes[last - self._n + 1]
        self._masteries = found[-self.kept_max :]

    def _success(self, value: float) -> int:
        return round(min(1.0, max(0.0, value / self._target)) * ONE)


class Returns:
    """The windows of all agents and levels."""

    def __init__(self, episodes_n: int, threshold: float, target: float | None) -> None:
        """No episode yet.

        Args:
            episodes_n: of so many a mean is taken.
            target: the return that is a full success. None: nothing is remembered.
        """
        self._told = episodes_n, threshold
        self.kept_max = 2 * episodes_n
        """Episodes that a window keeps."""
        self._target = target
        self.windows: OrderedDict[Place, Window] = OrderedDict()

    def add(self, place: Place, episode: Episode) -> None:
        """An episode was read to its end."""
        if self._target is None:
            return
        window = self.windows.pop(place, None) or Window(*self._told, self._target)
        window.add(episode)
        self.windows[place] = window
        if len(self.windows) > WINDOWS_MAX:
            self.windows.popitem(last=False)

    def only_newer(self, place: Place, at: tuple[float, int]) -> bool:
        """Whether no episode from before `at` makes a difference there; `at` may be infinite."""
        window = self.windows.get(place)
        return window is not None and window.only_newer(at)

    def mastered(self, place: Place, since: int) -> Mastery | None:
        """See `Window.mastered`."""
        window = self.windows.get(place)
        return None if window is None else window.mastered(since)


def _at(episode: Episode) -> At:
    return episode.at


def _sequence(mastery: Mastery) -> int:
    return mastery.sequence
