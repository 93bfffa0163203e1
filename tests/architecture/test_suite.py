"""What `tests/conftest.py` does with pytest's own fixtures: it goes by no published interface."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.conftest import pytest_collection_modifyitems, pytest_runtest_teardown

@pytest.fixture(scope="session")
def other():
    yield
    print("other ends")

@pytest.fixture(scope="session")
def stack(other):
    print("stack begins")
    yield
    print("stack ends")
"""
FIRST = """
def test_c(): print("c")
def test_a(stack): print("a")
def test_b(stack): print("b")
"""
SECOND = """
import pytest
@pytest.fixture(scope="session")
def stack():
    print("second begins")
    yield
    print("second ends")
def test_d(stack): print("d")
def test_e(other): print("e")
"""


def test_a_stack_ends_after_the_last_test_that_needs_it(tmp_path: Path) -> None:
    files = {"conftest.py": CONFTEST, "test_first.py": FIRST, "test_second.py": SECOND}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Without the options of the run that this is part of.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(tmp_path)]
    told = subprocess.run(
        command, env=own | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    lines = [line.lstrip(".") for line in told.stdout.splitlines()]
    happened = [line for line in lines if line in "abcde" or line.endswith((" begins", " ends"))]
    assert [line for line in happened if line] == [
        *("stack begins", "a", "b", "stack ends"),
        *("second begins", "d", "second ends"),
        *("c", "e", "other ends"),
    ]
