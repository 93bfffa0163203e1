"""Many sessions alive at once: memory a session, and the cost of a step beside 256 sessions.

    python loadtests/scale.py --sessions 10000 --json

All sessions are started and step for a while; durable, rewarded steps are counted between two
positions of the log's floor. The same is done with 256 sessions on the same stack right before.
`cpu_us_per_step` is the CPU time of all processes of the stack. `bytes_per_session` is how much the
workers' resident memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from rig import LEANING, Rig, rig, say, write_session

STEPS = 1_000_000
FEW = 256
STARTED_S_MAX = 180.0
MEASURED_S = 20.0
WORKERS_SESSIONS_MAX = "12000"


async def alive(stack: Rig, session: Path, count: int) -> dict[str, float]:
    """So many sessions at once."""
    before = stack.workers_memory_bytes()
    group = await stack.client.request(session, count=count)
    began = time.monotonic()
    started = 0
    while started < count:
        if time.monotonic() - began > STARTED_S_MAX:
            raise SystemExit(f"{started} of {count} sessions have started in {STARTED_S_MAX:g} s")
        await asyncio.sleep(0.5)
        started = await stack.scalar(
            "select count(*) from event_log where session_id = any(:ids) and key = 'started'",
            ids=list(group.session_ids),
        )
    start_s = time.monotonic() - began
    say(f"{count} sessions alive after {start_s:.0f} s")
    low, used, at = await stack.floor(), sum(stack.cpu_s().values()), time.perf_counter()
    await asyncio.sleep(MEASURED_S)
    high, used, lasted = (
        await stack.floor(),
        sum(stack.cpu_s().values()) - used,
        time.perf_counter() - at,
    )
    steps = await stack.scalar(
        "select count(*) from event_log where kind = 'reward.scored' "
        "and sequence > :low and sequence <= :high",
        low=low,
        high=high,
    )
    memory = stack.workers_memory_bytes() - before
    await stack.client.cancel(group.session_ids)
    await stack.client.wait(group, timeout_s=300)
    return {
        "sessions": count,
        "start_s": round(start_s, 1),
        "steps_per_s": round(steps / lasted),
        "cpu_us_per_step": round(used / max(steps, 1) * 1e6, 1),
        "bytes_per_session": memory // count,
    }


async def measure(count: int) -> dict[str, object]:
    """Few, then many."""
    async with rig(environment={"DSEC_SESSIONS_PER_WORKER_MAX": WORKERS_SESSIONS_MAX}) as stack:
        session = write_session(stack.directory / "case", STEPS, LEANING)
        few = await alive(stack, session, FEW)
        say(f"{few}")
        many = await alive(stack, session, count)
        say(f"{many}")
    return {
        "few": few,
        "many": many,
        "cost_ratio": round(many["cpu_us_per_step"] / few["cpu_us_per_step"], 2),
    }


def main() -> int:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.sessions))
    print(json.dumps(found) if arguments.json else found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
