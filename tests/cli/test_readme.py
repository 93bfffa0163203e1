"""The README's Python: all of it compiles, and what asks for sessions runs as it is printed."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest

import dsec

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
FIRST_LINES = [block.strip().splitlines()[0] for block in BLOCKS]


class RunningStack(Protocol):
    """See conftest.py."""

    state_dir: Path
    project: Path


def block_with(text: str) -> str:
    """The one that has this in it."""
    [found] = [block for block in BLOCKS if text in block]
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=FIRST_LINES)
def test_it_compiles_and_names_what_there_is(block: str) -> None:
    tree = ast.parse(block)
    compile(tree, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "dsec" or hasattr(dsec, node.attr), node.attr
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dsec"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, one.name) for one in node.names)


@pytest.mark.stack
@pytest.mark.timeout(180)
async def test_your_own_agent_is_asked_for_from_python(
    stack: RunningStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agent and reward function as printed, in the files of `dsec init`; then the client."""
    for name, content in {
        "agent.py": block_with("class MyAgent"),
        "reward.py": block_with("def ride"),
        "agent_spec.yaml": "entry: agent.py:MyAgent\n",
        "env_spec.yaml": (stack.project / "env_spec.yaml").read_text(),
        "session.yaml": "agent: agent_spec.yaml\nenv: env_spec.yaml\nreward: reward.py:ride\n"
        "seed: 7\nmax_steps: 40\n",
    }.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSEC_STATE_DIR", str(stack.state_dir))
    for name in ("DSEC_NATS_URL", "DSEC_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    episodes: list[dsec.Episode] = []
    names: dict[str, Any] = {
        "dsec": dsec,
        "network": SimpleNamespace(state_dict=lambda: {"w": np.arange(3.0)}),
        "trainer": SimpleNamespace(add=episodes.append),
    }
    block = block_with("dsec.Client()")
    code = compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(code, names)
    assert sum(len(episode.actions) for episode in episodes) == 8 * 40
    assert {episode.policy_version for episode in episodes} == {names["weights"]}
    for column in re.findall(r"# columns: (.*), …", block)[0].split(", "):
        assert len(getattr(episodes[0], column)), column
