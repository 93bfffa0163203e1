"""Copies that agents and environments make of the process that runs them: a verifier's or a check's
copy ends where user code comes back, and answers for nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FORK = "if pid := os.fork(): os.waitpid(pid, 0)"
AT_IMPORT = f"import os\n{FORK}\n"
AGENT = """import os
class A:
    def __init__(self, c): ...
    def step(self, o):
        {step}
        return {{'action': 0}}
"""
ENV = """import gymnasium, os
class E(gymnasium.Wrapper):
    def __init__(self): super().__init__(gymnasium.make('CartPole-v1'))
    def reset(self, **given):
        {reset}
        return super().reset(**given)
    def step(self, action):
        {step}
        return super().step(action)
"""
CHECKED = """
import sys
from dsec.client.check import check_spec
from dsec.client.specs import read_spec
for kind in ("env", "agent"):
    check_spec(read_spec(kind, f"{sys.argv[1]}/{kind}.yaml"))
print("checked", flush=True)
"""
VERIFIED = """
import pathlib, sys
from uuid import UUID
from dsec.reward.score import EnvScorer
from dsec.replay.verify import verify
from dsec.session.documents import AgentDocument, EnvDocument
from dsec.session.io import SessionConfig
from dsec.session.local import local_program, run_in_memory
sources = [{f"{n}.py": pathlib.Path(sys.argv[1], f"{n}.py").read_bytes()} for n in ("agent", "env")]
program = local_program(
    AgentDocument(entry="agent.py:A"), sources[0], EnvDocument(entry="env.py:E"), sources[1]
)
config, session = SessionConfig(7, 3), UUID("0192f0c1-2345-7abc-8def-0123456789ab")
rows = run_in_memory(program, config, session, EnvScorer())
import os; os.environ["FORKS"] = "1"
print("verified", verify(rows, program, config, None).ok, flush=True)
"""
HOSTED = """
import asyncio, os, pathlib, sys
from dsec.env_runtime.running import RunningSlot
from dsec.env_runtime.slices import Slices
def started():
    yield 0
    if pid := os.fork(): os.waitpid(pid, 0)
    return "started"
slot = RunningSlot(pathlib.Path(sys.argv[1], "slot"), 1, create=True)
print(asyncio.run(Slices(slot, 50, lambda: False).executed(started(), 0)), flush=True)
"""
LOADED = """
import os, pathlib, sys
from types import SimpleNamespace
from dsec.env_runtime.library import Library
from dsec.env_runtime.running import RunningSlot
from dsec.session.documents import AgentDocument, EnvDocument, seal
source = b"import os\\nif pid := os.fork(): os.waitpid(pid, 0)\\nclass A:\\n def step(self, o): ..."
agent, sealed = seal("agent", AgentDocument(entry="agent.py:A"), {"agent.py": source})
env, env_sealed = seal("env", EnvDocument(entry="gymnasium:CartPole-v1"), {})
slot = RunningSlot(pathlib.Path(sys.argv[1], "slot"), 1, create=True)
request = SimpleNamespace(agent_spec=agent, env_spec=env)
Library(None, None, slot)._loaded(request, sealed, env_sealed, 0)
print("loaded", flush=True)
"""


def told(folder: Path, code: str) -> str:
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    return done.stdout or done.stderr


@pytest.mark.parametrize("where", ["import", "reset", "step"])
def test_no_copy_goes_on_behind_the_check(tmp_path: Path, where: str) -> None:
    """It would request the sessions once more."""
    forks = {"reset": "pass", "step": "pass", where: FORK}
    head = AT_IMPORT if where == "import" else ""
    (tmp_path / "env.py").write_text(head + ENV.format(**forks))
    (tmp_path / "agent.py").write_text(head + AGENT.format(step="pass"))
    for kind, name in (("env", "E"), ("agent", "A")):
        text = f"entry: {kind}.py:{name}\ncode: [{kind}.py]\n"
        (tmp_path / f"{kind}.yaml").write_text(text)
    assert told(tmp_path, CHECKED) == "checked\n"


@pytest.mark.parametrize("where", ["reset", "step", "decision"])
def test_no_copy_goes_on_behind_a_verification(tmp_path: Path, where: str) -> None:
    """It would answer once more, which would be taken for the next session's verdict."""
    forks = {"reset": "pass", "step": "pass", "decision": "pass"}
    forks[where] = "if 'FORKS' in os.environ and (pid := os.fork()): os.waitpid(pid, 0)"
    (tmp_path / "env.py").write_text(ENV.format(**forks))
    (tmp_path / "agent.py").write_text(AGENT.format(step=forks["decision"]))
    assert told(tmp_path, VERIFIED) == "verified True\n"


@pytest.mark.parametrize(
    ("code", "says"), [(HOSTED, "started"), (LOADED, "loaded")], ids=["started", "loaded"]
)
def test_no_copy_of_a_worker_goes_on(tmp_path: Path, code: str, says: str) -> None:
    """It would start its sessions once more, on the worker's connections: where a start comes to
    its end in one piece, and where code forks as it is loaded."""
    assert told(tmp_path, code) == f"{says}\n"
