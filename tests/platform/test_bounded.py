"""The mapping that forgets its oldest entry."""

from __future__ import annotations

from dsec.platform.bounded import Bounded


def test_the_oldest_is_forgotten_and_what_is_used_is_not() -> None:
    kept: Bounded[str, int] = Bounded(2)
    kept.remember("a", 0)
    kept.remember("b", 1)
    assert kept.recall("a") == 0  # though it is falsy
    kept.remember("c", 2)
    assert list(kept.items()) == [("a", 0), ("c", 2)]
    assert kept.recall("b") is None
    kept.remember("a", 3)
    kept.remember("d", 4)
    assert list(kept.items()) == [("a", 3), ("d", 4)]


def test_looking_renews_nothing() -> None:
    kept: Bounded[str, int] = Bounded(2)
    kept.remember("a", 0)
    kept.remember("b", 1)
    assert (kept["a"], kept.get("a"), "a" in kept) == (0, 0, True)
    kept.remember("c", 2)
    assert list(kept) == ["b", "c"]
