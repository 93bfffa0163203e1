"""From `session.requested` to the first step, and how many sessions start a second.

    python loadtests/latency.py --json

Times are those in the events: when the client made the request, and when the lane made the tick
with the session's first step. `idle`: one session after the other on a stack that does nothing
else; `loaded`: the same while 256 sessions run. `sessions_started_per_s`: sessions of one step,
requested at once, over the time from the first request to the last `session.started`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import numpy as np
from sqlalchemy import text

from rig import LEANING, Rig, rig, say, write_session

BACKGROUND_STEPS = 1_000_000
SETTLE_S = 5.0


async def first_steps_ms(stack: Rig, ids: Sequence[UUID]) -> list[float]:
    """For each session, from its request to its first step."""
    async with stack.engine.connect() as connection:
        rows = await connection.execute(
            text(
                "select extract(epoch from s.event_time - r.event_time) * 1000 "
                "from event_log r join event_log s on s.session_id = r.session_id "
                "and s.session_at = r.session_at and s.key = 'step:0' "
                "where r.session_id = any(:ids) and r.key = 'requested'"
            ),
            {"ids": list(ids)},
        )
        return [float(ms) for (ms,) in rows]


async def one_by_one(stack: Rig, session: Path, count: int) -> dict[str, float]:
    """Latencies of sessions that are requested one after the other."""
    ids: list[UUID] = []
    for _ in range(count):
        group = await stack.client.request(session)
        await stack.client.wait(group, timeout_s=60)
        ids += group.session_ids
    found = await first_steps_ms(stack, ids)
    assert len(found) == count
    return {
        "first_step_ms_p50": round(float(np.percentile(found, 50)), 1),
        "first_step_ms_p99": round(float(np.percentile(found, 99)), 1),
    }


async def started_per_s(stack: Rig, session: Path, count: int) -> float:
    """Sessions that are requested at once."""
    group = await stack.client.request(session, count=count)
    await stack.client.wait(group, timeout_s=300)
    async with stack.engine.connect() as connection:
        rows = await connection.execute(
            text(
                "select extract(epoch from max(event_time) filter (where key = 'started') "
                "- min(event_time) filter (where key = 'requested')) "
                "from event_log where session_id = any(:ids)"
            ),
            {"ids": list(group.session_ids)},
        )
        return count / float(rows.scalar() or 1)


async def measure(count: int, background: int, burst: int) -> dict[str, object]:
    """Everything, on one stack."""
    async with rig() as stack:
        short = write_session(stack.directory / "short", 1, LEANING)
        long = write_session(stack.directory / "long", BACKGROUND_STEPS, LEANING)
        await stack.client.wait(await stack.client.request(short, count=4), timeout_s=60)
        idle = await one_by_one(stack, short, count)
        say(f"idle: {idle}")
        rate = await started_per_s(stack, short, burst)
        say(f"started a second: {rate:.0f}")
        group = await stack.client.request(long, count=background)
        await asyncio.sleep(SETTLE_S)
        loaded = await one_by_one(stack, short, count)
        say(f"with {background} running: {loaded}")
        await stack.client.cancel(group.session_ids)
        await stack.client.wait(group, timeout_s=120)
    return {"idle": idle, "loaded": loaded, "sessions_started_per_s": round(rate)}


def main() -> int:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="sessions of each latency")
    parser.add_argument("--background", type=int, default=256)
    parser.add_argument("--burst", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.count, arguments.background, arguments.burst))
    print(json.dumps(found) if arguments.json else found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
