"""Seconds from the kill of each process until the throughput is back.

    python loadtests/recovery.py --rounds 3 --json
    python loadtests/recovery.py --anchor-every 500

Sessions run on one embedded stack; every process is killed with SIGKILL in turn. It is back when
durable, rewarded steps have come at half of the rate before the kill for two seconds: half, since
the machine's own speed drifts. What is reported is the time until that began. Steps are counted of
every sixteenth session, since the count itself takes its time. Some sessions ask a tool now and
then and have anchors: theirs are counted where the tool service or anchor-sync is killed.

Without anchors a session that moves to another worker is re-executed from its first step, so what
a killed worker costs grows with the run; with `--anchor-every` it starts from its last anchor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from uuid import UUID

from dsec_contracts.keys import session_time
from rig import LEANING, WORKER, Rig, rig, say, write_session

CONFIG = "worker_deaths_max: 100000\nsession_lifecycle: {max_restarts: 1000}\n"
TARGETS = (
    WORKER,
    "env-runtime",
    "scheduler",
    "reward",
    "tool",
    "anchor-sync",
    "recorder",
    "nats-server",
    "postgres",
)
OF_THE_ASKING = ("tool", "anchor-sync")
ASKING_SESSIONS = 16
ASKING = {
    "agent.py": """
class Agent:
    def __init__(self, session_config):
        self.steps, self.asked = 0, False

    def step(self, observation):
        if self.steps % 20 == 0 and not self.asked:
            self.asked = True
            return {"tool_calls": [{"name": "lookup", "arguments": {"x": self.steps}}]}
        self.steps, self.asked = self.steps + 1, False
        return {"action": int(observation[2] > 0)}

    def on_tool_result(self, tool_id, result):
        pass

    def get_state(self):
        return [self.steps, self.asked]

    def set_state(self, state):
        self.steps, self.asked = state
""",
    "agent_spec.yaml": "entry: agent.py:Agent\ncode: [agent.py]\ntools: [{ref: lookup}]\n"
    "anchors: {every_steps: 50}\n",
    "env_spec.yaml": "entry: gymnasium:CartPole-v1\n",
    "tools.py": "def lookup(x):\n    return x\n",
    "lookup.yaml": "name: lookup\nentry: tools.py:lookup\ncode: [tools.py]\nidempotent: true\n"
    "parameters: {type: object, properties: {x: {type: integer}}, required: [x]}\n",
}
STEPS = 1_000_000
BEFORE_S, POLL_S, HELD_S = 6.0, 0.25, 2.0
BACK_SHARE = 0.5
EVERY = 16
WARM_STEPS = 50
BACK_S_MAX = 300.0


async def rewarded(stack: Rig, ids: Sequence[UUID]) -> int:
    """Durable, rewarded steps of some sessions so far."""
    return await stack.scalar(
        "select count(*) from event_log where session_id = any(:ids) "
        "and session_at = any(:times) and kind = 'reward.scored'",
        ids=list(ids),
        times=[session_time(session_id) for session_id in ids],
    )


async def rate(stack: Rig, ids: Sequence[UUID], seconds: float) -> float:
    """Steps a second."""
    low, began = await rewarded(stack, ids), time.perf_counter()
    await asyncio.sleep(seconds)
    return (await rewarded(stack, ids) - low) / (time.perf_counter() - began)


async def back_after_s(stack: Rig, ids: Sequence[UUID], wanted: float) -> float:
    """Until steps come at the wanted rate again, and go on so."""
    began = time.perf_counter()
    seen: deque[tuple[float, int]] = deque()
    while (now := time.perf_counter() - began) < BACK_S_MAX:
        try:
            at = await rewarded(stack, ids)
        except Exception as error:  # noqa: BLE001 - the database may be what was killed
            say(f"  {type(error).__name__}")
            seen.clear()
            await asyncio.sleep(POLL_S)
            continue
        seen.append((now, at))
        while now - seen[0][0] > HELD_S + POLL_S:
            seen.popleft()
        first_s, first = seen[0]
        if now - first_s >= HELD_S and (at - first) / (now - first_s) >= wanted:
            return first_s
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"not back within {BACK_S_MAX:g} s")


def anchored(every_steps: int) -> dict[str, str]:
    """The files of a session that keeps an anchor every so many steps; 0: none."""
    files = dict(LEANING)
    files["agent_spec.yaml"] += f"anchors: {{every_steps: {every_steps}}}\n"
    return files


async def measure(sessions: int, rounds: int, anchor_every: int) -> dict[str, dict[str, float]]:
    """Each process, so often."""
    found: dict[str, list[float]] = {name: [] for name in TARGETS}
    async with rig(config=CONFIG) as stack:
        session = write_session(stack.directory / "case", STEPS, anchored(anchor_every))
        asks = write_session(stack.directory / "asks", STEPS, ASKING)
        group = await stack.client.request(session, count=sessions)
        asking = await stack.client.request(asks, count=ASKING_SESSIONS)
        plain = group.session_ids[::EVERY]
        for some in (plain, asking.session_ids):
            while await rewarded(stack, some) < WARM_STEPS * len(some):  # noqa: ASYNC110 - a query
                await asyncio.sleep(1)
        for _ in range(rounds):
            for name in TARGETS:
                some = asking.session_ids if name in OF_THE_ASKING else plain
                before = await rate(stack, some, BEFORE_S)
                for process in stack.processes()[name]:
                    process.kill()
                seconds = await back_after_s(stack, some, before * BACK_SHARE)
                say(f"{name}: {seconds:.1f} s")
                found[name].append(seconds)
        await stack.client.cancel([*group.session_ids, *asking.session_ids])
    return {
        name: {"median_s": round(statistics.median(all_), 1), "worst_s": round(max(all_), 1)}
        for name, all_ in found.items()
    }


def main() -> int:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--anchor-every", type=int, default=0, help="steps; 0: no anchors")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.sessions, arguments.rounds, arguments.anchor_every))
    print(json.dumps(found) if arguments.json else found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
