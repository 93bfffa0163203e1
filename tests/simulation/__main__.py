"""`just simulate SEED`, `just simulate --seeds 5000`: run seeds, and say what went wrong in which.

One seed prints its plan, its trace and its verdict. Many print those that fail; each can then be
run alone. Exits 1 where one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tests.simulation.jobs import PortionLost, portions, results
from tests.simulation.simulate import Result, portion, simulate, told_of

FAILING_SHOWN_MAX = 20


def main() -> int:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(prog="just simulate", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="run this one and print its trace")
    parser.add_argument("--seeds", type=int, help="run so many, from --start on")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seconds", type=float, help="begin no more seeds after so long")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    if (given.seed is None) == (given.seeds is None):
        parser.error("give a SEED, or --seeds N")
    if given.seed is not None:
        return _one(simulate(given.seed), as_json=given.json)
    try:
        return _many(given)
    except PortionLost as lost:
        print(lost, file=sys.stderr)  # noqa: T201
        return 1


def _one(result: Result, *, as_json: bool) -> int:
    console = Console(highlight=False, soft_wrap=True)
    told = told_of(result)
    if as_json:
        console.print_json(json.dumps(told | {"trace": result.trace}))
        return 0 if result.ok else 1
    console.print(f"seed {result.seed}: {result.plan}", markup=False)
    for line in result.trace:
        loud = "FAULT" in line or " DIES " in line
        console.print(line, style="bold red" if loud else None, markup=False)
    _verdict(console, result.seed, result.failures)
    console.print(
        f"{result.virtual_s:.2f} s of virtual time, {result.callbacks} callbacks, "
        f"{result.kills} kills, digest {result.digest[:16]}"
    )
    return 0 if result.ok else 1


def _verdict(console: Console, seed: int, failures: list[str]) -> None:
    if not failures:
        console.print(f"seed {seed}: nothing lost, doubled or changed", style="green")
    for failure in failures:
        console.print(f"seed {seed}: {failure}", style="bold red", markup=False)


def _many(given: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    began_s = time.monotonic()
    failing: list[dict[str, Any]] = []
    totals = {"seeds": 0, "sessions": 0, "kills": 0, "virtual_s": 0.0}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=given.json) as progress:
        bar = progress.add_task("simulating", total=given.seeds)
        for told in _results(given, began_s):
            totals["seeds"] += 1
            for name in ("sessions", "kills", "virtual_s"):
                totals[name] += told[name]
            if not told["ok"]:
                failing.append(told)
                if len(failing) <= FAILING_SHOWN_MAX:
                    _verdict(progress.console, told["seed"], told["failures"][:3])
            progress.update(bar, advance=1)
    summary = totals | {
        "ok": not failing,
        "failing": [told["seed"] for told in failing],
        "not_run": given.seeds - totals["seeds"],
        "seconds": round(time.monotonic() - began_s, 2),
        "virtual_s": round(totals["virtual_s"]),
    }
    if given.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        Console(highlight=False, soft_wrap=True).print(
            f"{summary['seeds']} seeds, {summary['sessions']} sessions, {summary['kills']} kills, "
            f"{summary['virtual_s']} s of virtual time in {summary['seconds']} s: "
            + (f"FAILING {summary['failing']}" if failing else "nothing lost, doubled or changed")
        )
        if summary["not_run"]:
            Console(highlight=False, soft_wrap=True).print(
                f"{summary['not_run']} seeds did not run: {given.seconds:g} s were over"
            )
    return 1 if failing else 0


def _results(given: argparse.Namespace, began_s: float) -> Iterator[dict[str, Any]]:
    def in_time() -> Iterator[range]:
        for seeds in portions(given.start, given.seeds, given.jobs):
            if given.seconds is not None and time.monotonic() - began_s > given.seconds:
                return
            yield seeds

    if given.jobs > 1:
        yield from results(portion, in_time(), given.jobs)
        return
    for seeds in in_time():
        yield from portion(seeds)


if __name__ == "__main__":
    sys.exit(main())
