"""Durable, rewarded steps a second through the whole stack, beside a bare in-process loop.

    python loadtests/throughput.py --sessions 256 --pairs 3 --json
    python loadtests/throughput.py --all --json

One embedded stack (NATS, PostgreSQL with its default durability, all services) runs on this
machine. A pair is a batch of sessions through the stack and, right after it, a bare loop over the
same environment's reset and step, the same agent's step and on_reward, and the same reward. A step
counts when the rows of both the step and its reward are committed: the rows are counted between
two positions of the log's floor, taken while all sessions were running. The ratio is the median of
the pairs' ratios: the machine's speed drifts, so only figures of one run compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from uuid import UUID

from rig import Rig, rig, say, write_session

ENVIRONMENT = "CartPole-v1"
RAW_SECONDS = 3.0
WARM_UP_STEPS = 20
BATCH_SECONDS_MAX = 240.0
AGENT = '''
class Agent:
    """Leans with the pole; keeps the sum of what it was given."""

    def __init__(self, session_config):
        self.total = 0.0

    def step(self, observation):
        return {"action": 1 if observation[2] > 0 else 0}

    def on_reward(self, reward, done, info):
        self.total += reward
'''


def write_specs(directory: Path, max_steps: int) -> Path:
    """The session of this test as files; returns session.yaml."""
    files = {
        "agent.py": AGENT,
        "agent_spec.yaml": "entry: agent.py:Agent\n",
        "env_spec.yaml": f"entry: gymnasium:{ENVIRONMENT}\n",
    }
    write_session(directory / "warm_up", WARM_UP_STEPS, files)
    return write_session(directory / "measured", max_steps, files)


def raw_steps_per_s(seconds: float = RAW_SECONDS) -> float:
    """The bare loop: what one core does without any of this."""
    import gymnasium

    namespace: dict[str, object] = {}
    exec(AGENT, namespace)
    agent = namespace["Agent"]({})  # type: ignore[operator]
    env = gymnasium.make(ENVIRONMENT, disable_env_checker=True)
    observation, _ = env.reset(seed=1)
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(1000):
            observation, reward, terminated, truncated, info = env.step(
                agent.step(observation)["action"]
            )
            agent.on_reward(float(reward), terminated or truncated, info)
            if terminated or truncated:
                observation, _ = env.reset()
        steps += 1000
    return steps / (time.perf_counter() - began)


def cores_worth() -> float:
    """How many cores' work this machine does when all are busy: bare loops at once, one a core,
    over one alone. What the system calls cores are often two threads of one."""
    alone = raw_steps_per_s(1.0)
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores, get_context("spawn")) as pool:
        together = sum(pool.map(raw_steps_per_s, [2.0] * cores))
    return together / alone


@contextmanager
def collector() -> Iterator[tuple[str, list[int]]]:
    """Something that takes what telemetry is sent: its URL, and the bytes of each request."""
    taken: list[int] = []

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(len(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()


async def rewarded_between(stack: Rig, low: int, high: int) -> int:
    """Steps whose reward, and so both rows, lie between two positions."""
    return await stack.scalar(
        "select count(*) from event_log where kind = 'reward.scored' "
        "and sequence > :low and sequence <= :high",
        low=low,
        high=high,
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """Where the log stood, and what had been used, at one moment of a batch."""

    at_s: float
    floor: int
    cpu_s: dict[str, float]


async def sampled(stack: Rig, session_ids: Sequence[UUID]) -> tuple[list[Sample], int]:
    """Samples of a batch until its first session ends, and the workers' memory at most."""
    deadline = time.monotonic() + BATCH_SECONDS_MAX
    samples: list[Sample] = []
    memory = 0
    while time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        samples.append(Sample(time.perf_counter(), await stack.floor(), stack.cpu_s()))
        if len(samples) % 4:
            continue
        memory = max(memory, stack.workers_memory_bytes())
        if await stack.scalar(
            "select count(*) from event_log where kind = 'session.ended' "
            "and session_id = any(:ids)",
            ids=list(session_ids),
        ):
            break  # from here on fewer run
    return samples, memory


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch gave."""

    steps_per_s: float
    bytes_per_session: int
    cpu_us_per_step: dict[str, float]


async def batch(stack: Rig, session: Path, n: int) -> Batch:
    """One batch through the stack."""
    before = stack.workers_memory_bytes()
    group = await stack.client.request(session, count=n)
    samples, memory = await sampled(stack, group.session_ids)
    if len(samples) < 6:
        raise SystemExit("the batch was over before it could be measured: raise --steps")
    # Leave out the start, and the last interval, in which sessions ended.
    first, last = samples[len(samples) // 5], samples[-2]
    steps = await rewarded_between(stack, first.floor, last.floor)
    await stack.client.wait(group)
    used = {name: last.cpu_s[name] - first.cpu_s.get(name, 0.0) for name in last.cpu_s}
    return Batch(
        steps / (last.at_s - first.at_s),
        (memory - before) // n,
        {name: round(s / steps * 1e6, 1) for name, s in sorted(used.items()) if s > 0},
    )


async def measure(
    n: int, sync: str, pairs: int, steps_total: int, *, timescaledb: bool, telemetry_to: str = ""
) -> dict[str, object]:
    """One row of the result."""
    batches: list[Batch] = []
    raws: list[float] = []
    worth: list[float] = []
    environment = {"DSEC_OTLP_ENDPOINT": telemetry_to}
    async with rig(sync_interval=sync, timescaledb=timescaledb, environment=environment) as stack:
        session = write_specs(stack.directory, max(steps_total // n, 40))
        # Imports and caches are a worker's, not its sessions'.
        warm_up = stack.directory / "warm_up" / "session.yaml"
        await stack.client.wait(await stack.client.request(warm_up, count=2))
        for number in range(pairs):
            one = await batch(stack, session, n)
            raw = await asyncio.to_thread(raw_steps_per_s)
            worth.append(await asyncio.to_thread(cores_worth))
            say(
                f"{n} sessions, sync {sync}, pair {number + 1}: "
                f"{one.steps_per_s:,.0f} durable, {raw:,.0f} raw, "
                f"ratio {one.steps_per_s / raw:.3f}, CPU us a step {one.cpu_us_per_step}, "
                f"{os.cpu_count()} cores do the work of {worth[-1]:.2f}"
            )
            batches.append(one)
            raws.append(raw)
    rates = [one.steps_per_s for one in batches]
    ratios = [rate / raw for rate, raw in zip(rates, raws, strict=True)]
    return {
        "sessions": n,
        "sync": sync,
        "timescaledb": timescaledb,
        "tracing": bool(telemetry_to),
        "raw_steps_per_s": round(statistics.median(raws)),
        "durable_steps_per_s": round(statistics.median(rates)),
        "ratio": round(statistics.median(ratios), 3),
        "bytes_per_session": batches[0].bytes_per_session,
        "cpu_us_per_step": batches[-1].cpu_us_per_step,
        "cores_worth": round(statistics.median(worth), 2),
    }


async def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, action="append", help="how many; may be repeated")
    parser.add_argument("--sync", default="1s", help="nats-server's sync_interval, or `always`")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400_000, help="steps of a batch, in all")
    parser.add_argument("--all", action="store_true", help="every row that the README reports")
    parser.add_argument("--timescaledb", action="store_true", help="the log as a hypertable")
    parser.add_argument("--tracing", action="store_true", help="with telemetry on, as by default")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    plan = [(n, arguments.sync) for n in arguments.sessions or [256]]
    if arguments.all:
        plan = [(n, "1s") for n in (16, 64, 256, 1024, 4096)] + [
            (256, "always"),
            (1024, "always"),
        ]
    rows = []
    with collector() as (url, taken):
        for n, sync in plan:
            row = await measure(
                n,
                sync,
                arguments.pairs,
                arguments.steps,
                timescaledb=arguments.timescaledb,
                telemetry_to=url if arguments.tracing else "",
            )
            rows.append(row)
    if arguments.tracing and not taken:
        raise SystemExit("telemetry was on, and nothing of it came: this measured nothing")
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    asyncio.run(main())
