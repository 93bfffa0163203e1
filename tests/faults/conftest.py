"""A stack whose processes end where they are told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import RunningStack, running_stack

from dsec.client.client import Client
from dsec.platform.crash_points import VARIABLE

SESSIONS = 4
STEPS = 8
ROUND_S_MAX = 90.0
CONFIG = "worker_deaths_max: 10000\nsession_lifecycle: {max_restarts: 1000}\n"
AGENT = '''
class Agent:
    """Asks a tool before each step; acts on all that it was told so far."""

    def __init__(self, session_config):
        self.space = session_config["action_space"]
        self.total, self.asked = 0.0, False

    def step(self, observation):
        if not self.asked:
            self.asked = True
            return {"tool_calls": [{"name": "lookup", "arguments": {"x": self.total}}]}
        self.asked = False
        return {"action": (self.space.sample() + int(self.total)) % 2}

    def on_reward(self, reward, done, info):
        self.total += reward

    def on_tool_result(self, tool_id, result):
        self.total += result["y"]

    def get_state(self):
        return [self.total, self.asked]

    def set_state(self, state):
        self.total, self.asked = state
'''
FILES = {
    "agent.py": AGENT,
    "agent_spec.yaml": "entry: agent.py:Agent\ncode: [agent.py]\ntools: [{ref: lookup}]\n"
    "anchors: {every_steps: 3}\n",
    "env_spec.yaml": "entry: gymnasium:CartPole-v1\n",
    "reward.py": "import dsec\n\n@dsec.reward(weights={'a': 0.5})\ndef scored(t, services):\n"
    "    return {'a': t.env_reward + t.step}\n",
    "tools.py": "def lookup(x):\n    return {'y': (x * 7 + 1) % 5}\n",
    "lookup.yaml": "name: lookup\nentry: tools.py:lookup\ncode: [tools.py]\nidempotent: true\n"
    "parameters: {type: object, properties: {x: {type: number}}, required: [x]}\n",
    "session.yaml": "agent: agent_spec.yaml\nenv: env_spec.yaml\nreward: reward.py:scored\n"
    f"seed: 1\nmax_steps: {STEPS}\n",
}


class Crashing:
    """The stack, one kind of session, and the places where a process can be ended."""

    def __init__(self, stack: RunningStack, client: Client, session: Path, places: Path) -> None:
        self.stack = stack
        self.not_reached: list[str] = []
        self._client = client
        self._session = session
        self._places = places

    def places(self) -> list[str]:
        """Where the services and workers have been so far."""
        names = (self._places / "reached").read_text().split()
        return sorted({name for name in names if not name.startswith(("client.", "cli."))})

    def arm(self, place: str) -> None:
        """Whoever reaches it next is ended."""
        (self._places / place).write_text("1")

    def disarm(self, place: str) -> bool:
        """Whether it was not reached."""
        waits = (self._places / place).exists()
        (self._places / place).unlink(missing_ok=True)
        return waits

    async def run(self) -> dict[int | None, Any]:
        """New sessions to their end; what each came to, by its seed."""
        group = await self._client.request(self._session, count=SESSIONS)
        ids = list(group.session_ids)
        summaries = await self._client.wait(group, timeout_s=ROUND_S_MAX)
        rows = self.stack.sql(
            "select session_id, kind, count(*) as n, count(distinct key) as once, "
            "array_agg(value order by step) as values from event_log "
            "where session_id = any(%(ids)s) and kind in ('session.stepped', 'reward.scored', "
            "'tool.called', 'tool.returned', 'anchor.captured', 'session.ended') group by 1, 2",
            ids=ids,
        )
        aside = self.stack.sql(
            "select key from event_aside where session_id = any(%(ids)s) and verdict = 'conflict'",
            ids=ids,
        )
        return {
            one.seed: (
                (one.status, one.code, one.steps, one.chain_hash),
                sorted(
                    (row["kind"], row["n"], row["once"], row["values"])
                    for row in rows
                    if row["session_id"] == one.session_id
                ),
                [row["key"] for row in aside],
            )
            for one in summaries
        }


@pytest.fixture
def crash_stack(tmp_path: Path) -> Iterator[RunningStack]:
    """A stack of its own, whose processes look for places in `tmp_path / "places"`."""
    places, state_dir = tmp_path / "places", tmp_path / "state"
    for path in (places, state_dir):
        path.mkdir(mode=0o700)
    (state_dir / "scheduler.config.yaml").write_text(CONFIG)
    with running_stack(state_dir, **{VARIABLE: str(places)}) as running:
        yield running


@pytest.fixture
async def crashing(crash_stack: RunningStack, tmp_path: Path) -> AsyncIterator[Crashing]:
    """The stack and its sessions."""
    folder = tmp_path / "session"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(content)
    async with crash_stack.client() as client:
        yield Crashing(crash_stack, client, folder / "session.yaml", tmp_path / "places")
