"""What sessions that ask nobody lose when others beside them ask a rate-limited service.

    python loadtests/neighbours.py --json

One embedded stack runs plain sessions without end. By turns they are alone, and have callers beside
them, whose reward function asks a service on loopback that may be asked `--budget` times a second.
The ratio is that of the plain sessions' durable, rewarded steps a second beside callers over those
alone just before and after: the median of all pairs, since the machine's speed drifts.

Each call costs its own CPU time, the service's included, on the same cores as the plain sessions:
with a budget that fills a core this would measure the cores. So the budget is small, as a service's
that has to be limited is, and `caller_cpu_ms` says what a rewarded step of a caller's took of all
processes, beside what the plain steps of the same time cost when they were alone. On a machine
that others use too it says more than the ratio: `caller_cpu_share` is the share of the machine's
cores that callers took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from dsec.client.client import Group
from dsec.client.services_file import declare
from dsec_contracts.service import ServiceTerms
from rig import LEANING, Rig, rig, say, write_session
from slow_service import slow_service

SERVICE = "market"
STEPS_MAX = 10**9
SETTLE_S = 3.0
"""After callers came or went."""
WAIT_S_MAX = 120.0
ASKING = f"""
import dsec


@dsec.reward(weights={{"env": 1.0, "worth": 0.5}}, services=["{SERVICE}"])
async def asking(t, services):
    found = await services["{SERVICE}"].get("/worth", params={{"step": t.step}})
    return {{"env": float(t.env_reward), "worth": found.json()["worth"]}}
"""
PLAIN = """
import dsec


@dsec.reward(weights={"env": 1.0, "length": 0.125})
def plain(t, services):
    return {"env": float(t.env_reward), "length": 1.0 / (1 + t.step)}
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where everything stood at one moment."""

    at_s: float
    floor: int
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Window:
    """What one window gave, a second: rewarded steps of plain sessions and of callers, and the CPU
    time of each process."""

    plain: float
    callers: float
    cpu: dict[str, float]


async def mark(stack: Rig) -> Mark:
    """Now."""
    return Mark(time.perf_counter(), await stack.floor(), stack.cpu_s())


async def window(stack: Rig, seconds: float, callers: Sequence[UUID]) -> Window:
    """Measure for so long."""
    first = await mark(stack)
    await asyncio.sleep(seconds)
    last = await mark(stack)
    between = (
        "select count(*) from event_log where kind = 'reward.scored' and sequence > :low "
        "and sequence <= :high"
    )
    known = {"low": first.floor, "high": last.floor}
    rewarded = await stack.scalar(between, **known)
    asked = 0
    if callers:
        theirs = f"{between} and session_id = any(:ids)"
        asked = await stack.scalar(theirs, **known, ids=list(callers))
    took_s = last.at_s - first.at_s
    cpu = {name: (s - first.cpu_s.get(name, 0.0)) / took_s for name, s in last.cpu_s.items()}
    return Window((rewarded - asked) / took_s, asked / took_s, cpu)


async def stepping(stack: Rig, ids: Sequence[UUID], sessions_min: int) -> None:
    """Wait until so many of the sessions have a reward."""
    rewarded = (
        "select count(distinct session_id) from event_log "
        "where kind = 'reward.scored' and session_id = any(:ids)"
    )
    async with asyncio.timeout(WAIT_S_MAX):
        while await stack.scalar(rewarded, ids=list(ids)) < sessions_min:  # noqa: ASYNC110 - SQL
            await asyncio.sleep(0.5)


async def stopped(stack: Rig, group: Group) -> None:
    """Cancel sessions, and wait until they are over."""
    await stack.client.cancel(group.session_ids)
    await stack.client.wait(group)


async def beside(stack: Rig, session: Path, arguments: argparse.Namespace) -> Window:
    """A window with callers, which begin before it and are over after it."""
    group = await stack.client.request(session, count=arguments.callers)
    # Not all: the scheduler lets no more ask a service than its budget feeds.
    await stepping(stack, group.session_ids, min(arguments.callers, int(arguments.budget)))
    await asyncio.sleep(SETTLE_S)
    found = await window(stack, arguments.window_s, group.session_ids)
    await stopped(stack, group)
    await asyncio.sleep(SETTLE_S)
    return found


async def run(stack: Rig, url: str, arguments: argparse.Namespace) -> list[Window]:
    """Windows alone and beside callers by turns, beginning and ending alone."""
    terms = ServiceTerms.model_validate(
        {
            "base_url": url,
            "qps_budget": arguments.budget,
            "concurrency_max": 64,
            "deadline_s": 30.0,
            "latency_switch_ms": 3_600_000.0,  # nobody is slow here, the machine may be
        }
    )
    bus, log = await stack.client.bus(), await stack.client.log()
    await declare(bus, log, SERVICE, terms, "neighbours")
    reward = {"env": "env", "function": "reward.py:plain"}[arguments.reward]
    plain, asking = (
        write_session(
            stack.directory / name, STEPS_MAX, LEANING | {"reward.py": content}, reward=entry
        )
        for name, content, entry in (
            ("plain", PLAIN, reward),
            ("asking", ASKING, "reward.py:asking"),
        )
    )
    group = await stack.client.request(plain, count=arguments.plain)
    await stepping(stack, group.session_ids, arguments.plain)
    await asyncio.sleep(SETTLE_S)
    found = [await window(stack, arguments.window_s, ())]
    for number in range(arguments.pairs):
        found.append(await beside(stack, asking, arguments))
        found.append(await window(stack, arguments.window_s, ()))
        one = pair(*found[-3:])
        say(f"pair {number + 1}: " + "  ".join(f"{key} {value}" for key, value in one.items()))
    await stopped(stack, group)
    return found


def pair(before: Window, beside: Window, after: Window) -> dict[str, float]:
    """A window beside callers and those alone around it."""
    alone = (before.plain + after.plain) / 2
    used_alone = (sum(before.cpu.values()) + sum(after.cpu.values())) / 2
    callers_used = sum(beside.cpu.values()) - used_alone / alone * beside.plain
    return {
        "plain_alone_steps_per_s": round(alone, 1),
        "plain_beside_steps_per_s": round(beside.plain, 1),
        "ratio": round(beside.plain / alone, 3),
        "offered_per_s": round(beside.callers, 2),
        "caller_cpu_ms": round(callers_used / max(beside.callers, 1e-9) * 1000, 2),
        "caller_cpu_share": round(callers_used / (os.cpu_count() or 1), 3),
    }


def by_process(windows: Sequence[Window], alone: bool) -> dict[str, float]:
    """CPU seconds a second of each process, the median of the windows of one kind."""
    some = windows[0 if alone else 1 :: 2]
    names = sorted({name for one in some for name in one.cpu})
    found = {name: statistics.median(one.cpu.get(name, 0.0) for one in some) for name in names}
    return {name: round(used, 3) for name, used in found.items() if used >= 0.0005}


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """The result."""
    async with slow_service(1) as service, rig() as stack:
        windows = await run(stack, service.url, arguments)
        await service.end()
    pairs = [pair(*windows[n : n + 3]) for n in range(0, len(windows) - 2, 2)]
    told: dict[str, object] = {
        name: round(statistics.median(one[name] for one in pairs), 3) for name in pairs[0]
    }
    return told | {
        "budget_per_s": arguments.budget,
        "offered_in_10_s_max": service.seen["in_10_s_max"],
        "plain": arguments.plain,
        "callers": arguments.callers,
        "reward": arguments.reward,
        "ratios": [one["ratio"] for one in pairs],
        "cpu_alone": by_process(windows, alone=True),
        "cpu_beside": by_process(windows, alone=False),
    }


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", type=int, default=200, help="sessions that ask nobody")
    parser.add_argument("--callers", type=int, default=40, help="sessions that ask the service")
    parser.add_argument("--budget", type=float, default=20.0, help="requests a second")
    parser.add_argument("--reward", choices=("env", "function"), default="env", help="of the plain")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=12.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    told = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps(told))
        return
    for name, value in told.items():
        print(f"{name:26}", value)


if __name__ == "__main__":
    main()
