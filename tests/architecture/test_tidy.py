"""Rules of this house that no linter knows."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from dsec.platform.cancellation import cancelled
from dsec_contracts import EVENTS

SERVICES = Path(__file__).parents[2] / "services" / "dsec"
parsed = cache(ast.parse)
"""Several rules look at each module."""
LOOPING = ("scheduler", "env_runtime", "reward", "tool", "anchor_sync", "evaluator", "recorder")


def endless_loops(source: str) -> Iterator[int]:
    """The lines of `while True` loops of coroutines that wait for more than time."""
    for function in ast.walk(parsed(source)):
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        for loop in ast.walk(function):
            if isinstance(loop, ast.While) and ast.unparse(loop.test) == "True":
                waits = [node for node in ast.walk(loop) if isinstance(node, ast.Await)]
                if any(not ast.unparse(w.value).startswith("asyncio.sleep(") for w in waits):
                    yield loop.lineno


def test_loops_of_services_end_when_they_are_cancelled() -> None:
    files = [file for name in LOOPING for file in (SERVICES / name).rglob("*.py")]
    files.append(SERVICES / "platform" / "app.py")
    assert len(files) > 30
    found = [f"{file.name}:{line}" for file in files for line in endless_loops(file.read_text())]
    assert not found, f"use `while not cancelled()`: {found}"


def test_the_rule_finds_what_it_is_for() -> None:
    loop = "async def f():\n    while True:\n        await {}\n"
    assert list(endless_loops(loop.format("consumer.fetch(1)"))) == [2]
    assert not list(endless_loops(loop.format("asyncio.sleep(1)")))


async def test_a_cancellation_that_a_client_lost_is_seen() -> None:
    rounds = 0

    async def client_call() -> None:
        # As `asyncio.wait_for` does when the answer is there already.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)

    async def for_ever() -> None:
        nonlocal rounds
        while not cancelled():
            await client_call()
            rounds += 1

    task = asyncio.create_task(for_ever())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait_for(task, 1)
    assert rounds > 1


FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 350
"""About 250 are meant: a module that grows beyond this has a second noun in it."""


def long_functions(source: str) -> Iterator[str]:
    """The functions of a module that nobody can take in at one look."""
    for function in ast.walk(parsed(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{function.name}: {lines} lines"


def test_functions_are_short() -> None:
    root = SERVICES.parents[1]
    files = [*SERVICES.rglob("*.py"), *(root / "contracts").rglob("*.py")]
    found = [
        f"{file.relative_to(root)}, {name}"
        for file in files
        for name in long_functions(file.read_text())
    ]
    assert not found, f"at most {FUNCTION_LINES_MAX} lines: what it does in parts has names"
    assert list(long_functions("def f():\n" + FUNCTION_LINES_MAX * "    x = 1\n")) == [
        "f: 71 lines"
    ]


def test_modules_are_short() -> None:
    root = SERVICES.parents[1]
    files = [*SERVICES.rglob("*.py"), *(root / "contracts").rglob("*.py")]
    lines = {str(file.relative_to(root)): file.read_text().count("\n") for file in files}
    found = {name: count for name, count in lines.items() if count > MODULE_LINES_MAX}
    assert len(lines) > 300
    assert not found, f"at most {MODULE_LINES_MAX} lines: split by noun"


def undocumented(source: str) -> Iterator[str]:
    """The settings of a module, `Class.field`, that neither a description nor a docstring is of.

    A field that is a section of its own is documented there.
    """
    sections = {one.name for one in parsed(source).body if isinstance(one, ast.ClassDef)}
    for section in parsed(source).body:
        if not isinstance(section, ast.ClassDef):
            continue
        for field, behind in zip(section.body, [*section.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or ast.unparse(field.annotation) in sections:
                continue
            said = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            if not said and "description=" not in ast.unparse(field):
                yield f"{section.name}.{ast.unparse(field.target)}"


def test_every_setting_is_documented() -> None:
    files = sorted(SERVICES.glob("*/settings.py"))
    assert len(files) > 6
    found = [
        f"{file.parent.name}: {name}" for file in files for name in undocumented(file.read_text())
    ]
    assert not found, "say what it does, in which unit, and what happens at its bound"
    assert list(undocumented("class S:\n    wait_s: float = 1.0")) == ["S.wait_s"]
    assert not list(undocumented("class S:\n    wait_s: float = 1.0\n    'How long.'"))


UNPICKLING = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
MAY_UNPICKLE = ("env_runtime", "session")
"""What workers run. Unpickling runs whatever the bytes say, with the rights of whoever does it."""


def unpickles(source: str) -> bool:
    """Whether a module can unpickle: by a library for it, or by torch or numpy told to."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call):
            told = {word.arg for word in node.keywords}
            names = {"pickle"} if told & {"allow_pickle", "weights_only"} else set()
            names |= {"pickle"} if ast.unparse(node.func) == "torch.load" else set()
        else:
            continue
        if names & UNPICKLING:
            return True
    return False


def test_blobs_are_unpickled_only_in_workers() -> None:
    found = [
        str(file.relative_to(SERVICES))
        for file in SERVICES.rglob("*.py")
        if file.relative_to(SERVICES).parts[0] not in MAY_UNPICKLE and unpickles(file.read_text())
    ]
    assert not found, "these would run what others wrote"
    assert unpickles("from pickle import loads")
    assert unpickles("import torch\ntorch.load(f)")
    assert unpickles("import numpy\nnumpy.load(f, allow_pickle=True)")
    assert not unpickles("import json\njson.loads(s)")


def hearers(source: str) -> Iterator[str]:
    """The methods that a module gives a consumer, or a subscription, to call."""
    for call in ast.walk(parsed(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            last = call.args[-1] if call.args else None
            if call.func.attr in ("handle", "listen") and isinstance(last, ast.Attribute):
                yield last.attr


def test_whoever_hears_an_event_is_named_after_it() -> None:
    names = {event.handler_name() for event in EVENTS}
    found = [name for file in SERVICES.rglob("*.py") for name in hearers(file.read_text())]
    heard = [name.lstrip("_") for name in found if name != "bus"]
    assert len(heard) >= 9
    assert set(heard) <= names


def test_the_walk_through_the_code_names_files_that_are_there() -> None:
    """Whoever is new follows it: a file that was split or renamed has to be mended there, too."""
    readme = (SERVICES.parents[1] / "README.md").read_text()
    walk = readme.partition("Follow one `session.requested`.")[2].partition("\n**")[0]
    named = re.findall(r"`((?:\w+/)?)(\w+\.py)`", walk)
    assert len(named) > 15
    folder = ""
    for in_folder, file in named:
        folder = in_folder or folder
        assert (SERVICES / folder / file).is_file(), f"README.md names {folder}{file}"
