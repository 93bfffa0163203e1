"""A mapping with room for so many entries: whoever adds one more, the oldest is forgotten.

What is kept in one can be had again, or is worth no more than its place. Our own, and not one of
the libraries for caches, because workers use it: `cachetools` takes ``time.monotonic`` as a default
argument when it is imported. Imported here it would be imported before a worker's clocks are
redirected, and every `TTLCache` of user code would run on the process's clock, unseen.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(OrderedDict[K, V], Generic[K, V]):
    """The entries, the oldest first. Only `remember` adds any, and only `recall` renews one."""

    __slots__ = ("_entries_max",)

    def __init__(self, entries_max: int) -> None:
        super().__init__()
        self._entries_max = entries_max

    def remember(self, key: K, value: V) -> None:
        """Add an entry, or put its value anew: it is the newest from now on."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._entries_max:
            self.popitem(last=False)

    def recall(self, key: K) -> V | None:
        """The value of an entry, which is the newest from now on; None where there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value
