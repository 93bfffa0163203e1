"""What sessions hold is put beyond the collector's reach, and not for ever."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from dsec.env_runtime.heap import FROZEN_EVERY_SESSIONS, THAWED_SESSIONS_MIN, Heap


@pytest.fixture
def heap() -> Iterator[Heap]:
    """One that has begun; afterwards the process is as it was."""
    threshold = gc.get_threshold()
    gc.unfreeze()
    heap = Heap()
    heap.begin()
    yield heap
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_sessions_that_started_are_frozen_a_portion_at_a_time(heap: Heap) -> None:
    before = gc.get_freeze_count()
    held = [[n] for n in range(10_000)]
    for _ in range(FROZEN_EVERY_SESSIONS - 1):
        heap.started()
    assert gc.get_freeze_count() <= before
    heap.started()
    assert gc.get_freeze_count() >= before + len(held)


def test_they_are_looked_at_again_when_as_many_have_ended_as_there_are(heap: Heap) -> None:
    for _ in range(THAWED_SESSIONS_MIN - 1):
        heap.ended(0)
    assert gc.get_freeze_count() > 0
    heap.ended(0)
    assert gc.get_freeze_count() == 0
    heap.begin()
    for _ in range(3 * THAWED_SESSIONS_MIN - 1):
        heap.ended(3 * THAWED_SESSIONS_MIN)
    assert gc.get_freeze_count() > 0
    heap.ended(3 * THAWED_SESSIONS_MIN)
    assert gc.get_freeze_count() == 0
