"""Seeds in processes of their own, which end with the run however that ends.

A process that dies, or that is silent for too long, fails the run and names its seeds. Whoever is
interrupted or fails kills the others first: waited for, they would go on to the end of their
portions; left behind, they would wait for work for ever.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from dsec.platform.parent import die_with_parent

SEEDS_A_PORTION = 20
PORTION_S_MAX = 900.0
"""Longer than a portion takes on a machine that others use too."""
Portion = Callable[[range], list[dict[str, Any]]]


class PortionLost(Exception):
    """The process that ran some seeds died, or does not end."""


def portions(start: int, count: int, jobs: int) -> list[range]:
    """`count` seeds from `start` on, in portions of which each job gets one."""
    size = max(1, min(SEEDS_A_PORTION, -(-count // max(jobs, 1))))
    last = start + count
    return [range(first, min(first + size, last)) for first in range(start, last, size)]


def results(run: Portion, given: Iterable[range], jobs: int) -> Iterator[dict[str, Any]]:
    """What became of the seeds, in their order. `given` is asked for no more than is worked on.

    Raises:
        PortionLost: names the seeds.
    """
    pool = ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_begin
    )
    try:
        waiting: list[tuple[range, Future[list[dict[str, Any]]]]] = []
        for seeds in given:
            waiting.append((seeds, pool.submit(run, seeds)))
            while len(waiting) >= jobs * 2:
                yield from _result(*waiting.pop(0))
        for one in waiting:
            yield from _result(*one)
    except BaseException:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _result(seeds: range, waiting: Future[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    try:
        return waiting.result(PORTION_S_MAX)
    except BrokenProcessPool as error:
        raise PortionLost(f"a process died while seeds {_told(seeds)} were run") from error
    except TimeoutError as error:
        told = f"seeds {_told(seeds)} have not ended after {PORTION_S_MAX:g} s"
        raise PortionLost(told) from error


def _told(seeds: range) -> str:
    return f"{seeds.start} to {seeds.stop - 1}"


def _begin() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's to handle: user code would swallow it
