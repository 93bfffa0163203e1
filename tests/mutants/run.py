"""Take each guard away in turn, in a copy, and see that its test fails.

    just mutants                 # all
    just mutants floor           # those whose promise or file has this word

A guard counts as kept by its test if pytest runs and fails. A guard whose text is no longer there,
a test that passes without it, and a test that cannot be run are errors: exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("guards.toml")
COPIED = ("services", "contracts", "migrations", "tests", "deploy", "loadtests", "pyproject.toml")
TEST_S_MAX = 90
RUN_S_MAX = 300
TESTS_FAILED = 1
"""pytest's exit status; others mean that nothing was collected, or that pytest was used wrongly."""


@dataclass(frozen=True, slots=True)
class Guard:
    """One entry of the list."""

    promise: str
    file: str
    text: str
    instead: str
    test: str


def guards() -> list[Guard]:
    """The list."""
    return [Guard(**entry) for entry in tomllib.loads(LIST.read_text())["guard"]]


def without(guard: Guard, source: str) -> str:
    """The text of its file without a guard.

    Raises:
        ValueError: its text is not there exactly once.
    """
    if (count := source.count(guard.text)) != 1:
        raise ValueError(f"{guard.file} has the guard's text {count} times, not once")
    return source.replace(guard.text, guard.instead)


def verdict(guard: Guard, copy: Path) -> str:
    """`missed`: the test passes with the guard and fails without; otherwise what is wrong."""
    path = copy / guard.file
    source = path.read_text()
    try:
        mutant = without(guard, source)
    except ValueError as error:
        return str(error)
    if (said := outcome(guard.test, copy)) != "passed":
        return f"{guard.test} proves nothing: with the guard it {said}"
    try:
        path.write_text(mutant)
        said = outcome(guard.test, copy)
    finally:
        path.write_text(source)
    return "missed" if said == "failed" else f"{guard.test}, without it: {said}"


def outcome(test: str, copy: Path) -> str:
    """`passed`, `failed`, or why it could not be run. A test that hangs fails, by pytest's own
    bound on each test."""
    bound = f"--timeout={TEST_S_MAX}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", bound, test],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": f"{copy / 'services'}:{copy / 'contracts'}"},
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {RUN_S_MAX} s"
    known = {0: "passed", TESTS_FAILED: "failed"}
    return (
        known.get(done.returncode) or f"pytest ended with {done.returncode}: {done.stdout[-500:]}"
    )


def main() -> int:
    """Try them as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only guards that have it")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [one for one in guards() if arguments.word in one.promise + one.file]
    console = Console(stderr=True)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="dsec-mutants-") as name:
        copy = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / part)
        for guard in track(chosen, "guards", console=console):
            found[guard.promise] = said = verdict(guard, copy)
            console.print(
                f"{'kept ' if said == 'missed' else 'WRONG'} {guard.promise}"
                + ("" if said == "missed" else f": {said}"),
                markup=False,
            )
    wrong = {promise: said for promise, said in found.items() if said != "missed"}
    if arguments.json:
        print(json.dumps({"ok": not wrong, "guards": len(found), "wrong": wrong}))
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
