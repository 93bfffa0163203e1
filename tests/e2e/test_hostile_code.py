"""User code that misbehaves ends its own session; its neighbours never notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsec.client.client import Client

pytestmark = pytest.mark.stack

NEIGHBOURS = 200
STEPS = 60

HOSTILE = {
    # name: (body of step at step 5, expected code, what the message must name)
    "raises": ("raise ValueError('mine')", "agent_raised", "ValueError: mine"),
    "returns_nonsense": ("return 42", "agent_invalid", "42"),
    "exits_politely": ("raise SystemExit(3)", "agent_raised", "SystemExit"),
    "calls_exit": ("import os; os._exit(0)", "agent_crashed", "exit"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "agent_crashed", "signal"),
    "has_itself_killed": (
        "import subprocess; subprocess.run(['sh', '-c', 'kill -9 $PPID'])",
        "agent_crashed",
        "4 workers that it had to itself were killed at step 4",
    ),
    "raises_what_is_ours": (
        "from dsec.session.adapters.gymnasium import EnvError; raise EnvError('mine', 'mine')",
        "agent_raised",
        "EnvError: mine",
    ),
    "signals_itself": (
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "agent_raised",
        "other sessions run in this process",
    ),
    "sets_a_timer": (
        "import signal; signal.setitimer(signal.ITIMER_REAL, 0.05)",
        "agent_raised",
        "belong to the whole process",
    ),
    "stops_the_loop": (
        "import asyncio; asyncio.get_running_loop().stop()",
        "agent_raised",
        "no running event loop",
    ),
    "closes_the_loop": (
        "import asyncio; asyncio.get_event_loop().close()",
        "agent_raised",
        "no running event loop",
    ),
    "cancels_all": (
        "import asyncio; [task.cancel() for task in asyncio.all_tasks()]",
        "agent_raised",
        "no running event loop",
    ),
    "blocks": ("\n            while True: pass", "step_deadline", "deadline"),
    "opens_files": (
        "\n            while True: self.kept.append(open('/dev/null'))",
        "agent_raised",
        "Too many open files",
    ),
    "writes_without_end": (
        "\n            import tempfile"
        "\n            with tempfile.TemporaryFile() as file:"
        "\n                while True: file.write(bytes(1 << 20))",
        "agent_raised",
        "File too large",
    ),
    "forks_without_end": (
        "\n            import os\n            while True: os.fork()",
        "agent_crashed",
        "signal",
    ),
    "starts_without_end": (
        "\n            import subprocess"
        "\n            while True: self.kept.append(subprocess.Popen(['sleep', '3599.25']))",
        "agent_crashed",
        "signal",
    ),
    "fills_memory": (
        "\n            while True: self.kept.append(bytearray(64 << 20))",
        "oom",
        "oom",
    ),
}

OUTRAN_THE_WATCH = {
    # Where the machine is so busy that the watch comes late, one of the kernel's own bounds stops
    # it: whichever it meets first.
    "starts_without_end": (
        "agent_raised",
        "Resource temporarily unavailable|Too many open files",
    ),
}

BREAKS_MODULES = """
            import copy, hashlib, json, struct, traceback
            def broken(*args, **kwargs): raise RuntimeError("broken")
            hashlib.sha256 = hashlib.blake2b = hashlib.new = json.loads = json.dumps = broken
            struct.pack = struct.unpack = struct.Struct = copy.deepcopy = broken
            traceback.format_exception = broken"""

AGENT = """
class Agent:
    def __init__(self, session_config):
        self.space = session_config["action_space"]
        self.steps = 0
        self.kept = []

    def step(self, observation):
        self.steps += 1
        if self.steps == 5:
            {body}
        return {{"action": self.space.sample()}}
"""


def _running(mark: str) -> list[psutil.Process]:
    """Processes that have this among their arguments."""
    processes = psutil.process_iter(["cmdline"])
    return [one for one in processes if mark in (one.info["cmdline"] or ())]


async def test_hostile_sessions_end_typed_and_neighbours_finish(
    client: Client, session_files: Callable[..., Path], good_agent: str, stack: Any
) -> None:
    undisturbed = await client.request(
        session_files(good_agent, max_steps=STEPS, name="alone"), count=NEIGHBOURS
    )
    expected = {row.seed: row.chain_hash for row in await client.wait(undisturbed)}
    hostile = {}
    neighbours = await client.request(
        session_files(good_agent, max_steps=STEPS, name="beside"), count=NEIGHBOURS
    )
    for name, (body, _, _) in HOSTILE.items():
        session = session_files(
            AGENT.format(body=body),
            max_steps=STEPS,
            name=name,
            # Filling memory takes a while, too, where the machine is busy.
            agent_keys=f"step_deadline_s: {1.5 if name == 'blocks' else 20}\n",
        )
        hostile[name] = await client.request(session)
    forking = await client.request(
        session_files(AGENT.format(body="import os; os.fork()"), max_steps=STEPS, name="forks")
    )
    breaking = await client.request(
        session_files(AGENT.format(body=BREAKS_MODULES), max_steps=STEPS, name="breaks")
    )
    async with asyncio.timeout(240):
        ended = await client.wait(neighbours)
        assert [row.code for row in await client.wait(forking)] == ["max_steps"]
        assert [row.code for row in await client.wait(breaking)] == ["max_steps"]
        for name, (_, code, told) in HOSTILE.items():
            [row] = await client.wait(hostile[name])
            expected_end = (code, told)
            if row.code != code:
                expected_end = OUTRAN_THE_WATCH.get(name, expected_end)
            assert (row.status, row.code) == ("failed", expected_end[0]), (name, row)
            [end] = stack.sql(
                "select circumstance from event_log where session_id = %(id)s "
                "and kind = 'session.ended'",
                id=row.session_id,
            )
            message = end["circumstance"]["message"]
            assert any(said in message for said in expected_end[1].split("|")), (name, end)
    assert {row.status for row in ended} == {"completed"}
    assert {row.seed: row.chain_hash for row in ended} == expected
    # What its code started ends with a worker.
    await asyncio.to_thread(stack.until, lambda: not _running("3599.25"))


async def test_of_32_sessions_one_raises_in_its_reward_function_and_31_are_untouched(
    client: Client, session_files: Callable[..., Path], good_agent: str, stack: Any
) -> None:
    """All have one function, so the same process scores them; one of them comes to a step that the
    function raises at."""
    reward = (
        "import dsec\n\n@dsec.reward(weights={'alive': 1.0, 'place': 0.5})\n"
        "def score(t, services):\n"
        "    if t.step == 4 and float(t.observation[0]) == RAISES_AT:\n"
        "        raise RuntimeError('no score')\n"
        "    return {'alive': t.env_reward, 'place': float(t.observation[0])}\n"
    )

    async def outcomes(name: str, raises_at: float | None) -> dict[int, Any]:
        files = {"reward.py": reward.replace("RAISES_AT", repr(raises_at))}
        session = session_files(good_agent, reward="reward.py:score", files=files, name=name)
        group = await client.request(session, count=32)
        async with asyncio.timeout(90):
            return {row.seed: row for row in await client.wait(group)}

    undisturbed = await outcomes("all-score", None)
    assert {row.status for row in undisturbed.values()} == {"completed"}
    seed, row = sorted(undisturbed.items())[17]
    episodes = [one async for one in client.episodes([row.session_id]) if one.episode == 0]
    found = await outcomes("one-raises", float(episodes[0].observations[4][0]))
    bad = found.pop(seed)
    assert (bad.status, bad.code, bad.steps) == ("failed", "reward_raised", 5)
    assert bad.attempts == 1, "what raises once raises always: it is not tried on other workers"
    assert (
        "RuntimeError: no score" in (await client.queries.messages([bad.session_id])).popitem()[1]
    )
    rewards = stack.sql(
        "select step, kind, fact_json ->> 'code' as code from event_log "
        "where session_id = %(id)s and kind like 'reward.%%' order by step",
        id=bad.session_id,
    )
    assert [(one["step"], one["kind"]) for one in rewards] == [
        *((step, "reward.scored") for step in range(4)),
        (4, "reward.missing"),
    ]
    assert rewards[-1]["code"] == "reward_raised"
    for other, one in found.items():
        wanted = undisturbed[other]
        assert (one.status, one.chain_hash) == ("completed", wanted.chain_hash)
        assert one.reward_total == wanted.reward_total
        assert one.attempts == 1
