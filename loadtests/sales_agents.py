"""The sales scenario: rewards come from three services that are slow, limited and down.

    python loadtests/sales_agents.py --json

287 agents, one for each customer segment, choose coupons for a customer an hour, a day long. What a
decision is worth three services on loopback say (`sales/services.py`), whose latency, refusals and
outages follow from a seed. Each mode runs against services that begin anew:

`plain`           no DSec: each session calls the services itself, and what is not answered ends it
`plain_restarts`  the same, and a session that ended begins again until it finishes
`L1`              DSec: budgets are kept, and callers are spread
`L1+L2`           and sessions go on while the rewards of a slow service are on their way
`L1+L2+L3`        and one whose rewards lag badly has its curriculum level lowered for the time

`stability` is the share of sessions that finish with every reward accounted for, `cycle_s` the time
until the last has ended, `over_budget_calls` what the services counted, `made_up_rewards` rewards
in the log that no answer of all three services stands behind, `level_changes` how often a level
was lowered or raised. `false_positive_hours` are the hours in which the risk service was made to
take good customers for bad ones, and those that SQL over the log finds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from json import dumps
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlencode, urlsplit
from uuid import UUID

from sqlalchemy import text

from dsec.client.queries import Summary
from dsec.client.services_file import declare
from dsec_contracts.service import ServiceTerms
from rig import Rig, rig, say, write_session

FOLDER = Path(__file__).with_name("sales")
MODES = ("plain", "plain_restarts", "L1", "L1+L2", "L1+L2+L3")
PLAIN_TIMEOUT_S = 2.0
LAG_STEPS_MAX = 8
CONFIG = """
curriculum: {lag_steps_high: 4, lag_s: 5, recover_s: 5, lag_steps_low: 1}
"""
PLAIN_RESTART_S = 0.5
PLAIN_START_WITHIN_S = 10.0
"""Without DSec nobody spreads the sessions: they come one by one, as customers do."""


def module(name: str) -> ModuleType:
    """One of the scenario's files, as a module."""
    spec = importlib.util.spec_from_file_location(f"sales_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


@dataclass
class Outcome:
    """What one mode did."""

    stability: float
    cycle_s: float
    missing_rewards: int = 0
    made_up_rewards: int = 0
    over_budget_calls: int = 0
    level_changes: int = 0
    restarts: int = 0
    found_hours: list[int] | None = None
    calls: dict[str, Any] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def services(seed: int, outcome: list[dict[str, Any]]) -> AsyncIterator[dict[str, str]]:
    """The three services, from now on: their URLs, and in `outcome` what they saw."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(FOLDER / "services.py"),
        str(seed),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())
        process.stdin.close()
        outcome.append(json.loads(await process.stdout.readline()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# -- without DSec ----------------------------------------------------------------------------------


class Unanswered(Exception):
    """A service did not answer as it should."""


class PlainService:
    """One service, as a session that calls it itself sees it, over a connection of its own.

    It blocks, like most clients that people write; a session is a thread.
    """

    def __init__(self, url: str) -> None:
        found = urlsplit(url)
        self._root = found.path
        self._connection = http.client.HTTPConnection(found.netloc, timeout=PLAIN_TIMEOUT_S)

    async def get(self, path: str, params: dict[str, Any]) -> PlainService:
        """Ask by GET."""
        return self._ask("GET", f"{path}?{urlencode(params)}", None)

    async def post(self, path: str, json: dict[str, Any]) -> PlainService:
        """Ask by POST."""
        return self._ask("POST", path, dumps(json))

    def _ask(self, method: str, path: str, body: str | None) -> PlainService:
        try:
            self._connection.request(method, self._root + path, body)
            answer = self._connection.getresponse()
            self._body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unanswered(repr(error)) from error
        if answer.status != http.client.OK:
            raise Unanswered(str(answer.status))
        return self

    def json(self) -> Any:
        """The answer that came last."""
        return json.loads(self._body)

    def close(self) -> None:
        """Drop the connection; the next call makes another."""
        self._connection.close()


class PlainRun:
    """All sessions, each in a thread of its own."""

    def __init__(self, urls: dict[str, str], seed: int, steps: int, limit_s: float) -> None:
        self._shop, self._agent, self._reward = (module(n) for n in ("shop", "agent", "reward"))
        self._urls, self._seed, self._steps = urls, seed, steps
        self._until_s = time.monotonic() + limit_s
        self.restarts = 0

    def _session(self, number: int, services: dict[str, PlainService]) -> None:
        """One session from its beginning to its end.

        Raises:
            Unanswered: a service did not answer, and that was that.
        """
        env = self._shop.Shop()
        agent = self._agent.Seller({"action_space": env.action_space, "seed": self._seed + number})
        observation, _ = env.reset(seed=self._seed + number)
        for step in range(self._steps):
            action = agent.step(observation)["action"]
            observation, _, terminated, _, info = env.step(action)
            scores = driven(self._reward.sales(SimpleNamespace(info=info), services))
            value = sum(scores[name] * w for name, w in self._reward.WEIGHTS.items())
            agent.on_reward(value, terminated, {"dsec": {"step": step}})
            if terminated:
                observation, _ = env.reset()

    def finishes(self, number: int, *, restarts: bool) -> bool:
        """Whether a session finishes: at its first attempt, or before time is up."""
        services = {name: PlainService(url) for name, url in self._urls.items()}
        time.sleep(Random(f"{self._seed} {number}").uniform(0, PLAIN_START_WITHIN_S))
        while True:
            try:
                self._session(number, services)
            except Unanswered:
                if not restarts or time.monotonic() > self._until_s:
                    return False
                self.restarts += 1
                time.sleep(PLAIN_RESTART_S)
            else:
                return True
            finally:
                for service in services.values():
                    service.close()


def driven(coroutine: Any) -> Any:
    """The result of a coroutine whose calls block."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise RuntimeError("the function awaited something other than its services")


async def plain(
    urls: dict[str, str], seed: int, agents: int, steps: int, limit_s: float, *, restarts: bool
) -> Outcome:
    """Every session calls the services itself."""
    run = PlainRun(urls, seed, steps, limit_s)
    loop, began = asyncio.get_running_loop(), time.monotonic()
    with ThreadPoolExecutor(agents) as threads:
        attempts = [
            loop.run_in_executor(threads, partial(run.finishes, n, restarts=restarts))
            for n in range(agents)
        ]
        done = await asyncio.gather(*attempts)
    return Outcome(sum(done) / agents, time.monotonic() - began, restarts=run.restarts)


# -- with DSec -------------------------------------------------------------------------------------


def terms(urls: dict[str, str], *, deferred: bool) -> dict[str, ServiceTerms]:
    """How the services may be asked; without `deferred` none is ever slow enough to switch."""
    shared = {"concurrency_max": 64, "deadline_s": 60.0, "attempt_s_max": PLAIN_TIMEOUT_S}
    switch = {} if deferred else {"latency_switch_ms": 3_600_000.0}
    budget = module("services").QPS_BUDGET
    return {
        name: ServiceTerms.model_validate(
            {"base_url": url, "qps_budget": budget[name], "retry": {"attempts_max": 50}}
            | shared
            | switch
        )
        for name, url in urls.items()
    }


async def with_dsec(
    stack: Rig, mode: str, urls: dict[str, str], seed: int, agents: int, steps: int
) -> Outcome:
    """One mode on a running stack."""
    client = stack.client
    bus, log = await client.bus(), await client.log()
    for name, one in terms(urls, deferred="L2" in mode).items():
        await declare(bus, log, name, one, "sales")
    keys: dict[str, str] = {}
    if "L2" in mode:
        keys = {"reward_lag_steps_max": str(LAG_STEPS_MAX)}
    if "L3" in mode:
        keys["curriculum_level"] = "2"
    folder = stack.directory / mode.replace("+", "_")
    session = write_session(
        folder,
        steps,
        {path.name: path.read_text() for path in FOLDER.iterdir() if path.is_file()},
        reward="reward.py:sales",
        seed=str(seed),
        **keys,
    )
    began = time.monotonic()
    group = await client.request(session, count=agents)
    summaries = await client.wait(group, timeout_s=None)
    cycle_s = time.monotonic() - began
    return await accounted(stack, group.session_ids, summaries, cycle_s)


_MISSING = """
select count(*) from event_log l where l.session_id = any(:ids) and l.kind = 'reward.missing'
and not exists (select from event_log r where r.session_id = l.session_id
    and r.session_at = l.session_at and r.key = 'reward:' || l.step || '.1')
"""
_MADE_UP = """
select count(*) from event_log l where l.session_id = any(:ids) and l.kind = 'reward.scored'
and (l.extras is null or position('inventory'::bytea in l.extras) = 0
    or position('price'::bytea in l.extras) = 0 or position('risk'::bytea in l.extras) = 0)
"""
_LEVEL_CHANGES = """
select count(*) from event_log where session_id = any(:ids) and kind = 'curriculum.changed'
"""
_FALSE_POSITIVES = """
with step as (
    select session_id, step,
        max(score) filter (where name = 'hour') as hour,
        max(score) filter (where name = 'flagged') as flagged,
        max(score) filter (where name = 'good') as good
    from reward_component
    where session_id = any(:ids) and revision = 1
    group by session_id, step
), rate as (
    select hour::integer as hour, avg(flagged) as share from step where good = 1 group by hour
)
select hour from rate
where share > 3 * (select percentile_cont(0.5) within group (order by share) from rate)
order by hour
"""


async def accounted(
    stack: Rig, ids: Sequence[UUID], summaries: Sequence[Summary], cycle_s: float
) -> Outcome:
    """What the log says of a group that has ended. All of it is SQL."""
    known = {"ids": list(ids)}
    async with stack.engine.connect() as connection:
        missing = (await connection.execute(text(_MISSING), known)).scalar_one()
        changes = (await connection.execute(text(_LEVEL_CHANGES), known)).scalar_one()
        made_up = (await connection.execute(text(_MADE_UP), known)).scalar_one()
        hours = [row.hour for row in await connection.execute(text(_FALSE_POSITIVES), known)]
        scored = (
            await connection.execute(
                text(
                    "select session_id, count(*) as n from event_log where session_id = any(:ids)"
                    " and kind = 'reward.scored' group by session_id"
                ),
                known,
            )
        ).all()
    counts = {row.session_id: row.n for row in scored}
    done = [
        one
        for one in summaries
        if one.status == "completed"
        and counts.get(one.session_id, 0) + one.rewards_missing == one.steps
    ]
    return Outcome(
        len(done) / len(ids),
        cycle_s,
        missing_rewards=missing,
        made_up_rewards=made_up,
        level_changes=changes,
        found_hours=hours,
    )


# -- the comparison --------------------------------------------------------------------------------


async def compare(modes: Sequence[str], arguments: argparse.Namespace) -> dict[str, Outcome]:
    """Each mode against services that begin anew."""
    found: dict[str, Outcome] = {}
    for mode in modes:
        seen: list[dict[str, Any]] = []
        a = arguments
        async with contextlib.AsyncExitStack() as stay:
            # The stack first: the services' troubles begin with them.
            stack = None
            if not mode.startswith("plain"):
                stack = await stay.enter_async_context(rig(config=CONFIG if "L3" in mode else ""))
            urls = await stay.enter_async_context(services(a.seed, seen))
            if stack is None:
                again = mode == "plain_restarts"
                outcome = await plain(urls, a.seed, a.agents, a.steps, a.limit_s, restarts=again)
            else:
                outcome = await with_dsec(stack, mode, urls, a.seed, a.agents, a.steps)
        outcome.calls = seen[0]
        outcome.over_budget_calls = sum(one["over_budget"] for one in outcome.calls.values())
        found[mode] = outcome
        say(f"{mode}: {outcome}")
    return found


def main() -> int:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--agents", type=int, default=287)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--limit-s", type=float, default=900.0, help="for each mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = asyncio.run(compare(arguments.modes, arguments))
    told = as_told(found, module("services").planted_hours(arguments.seed))
    if arguments.json:
        print(json.dumps(told))
    else:
        for mode, one in told.items():
            print(f"{mode:22}", one)
    return 0


def as_told(found: dict[str, Outcome], planted: list[int]) -> dict[str, Any]:
    """The result, by mode."""
    told: dict[str, Any] = {}
    for mode, outcome in found.items():
        told[mode] = {
            "stability": round(outcome.stability, 4),
            "cycle_s": round(outcome.cycle_s, 1),
            "over_budget_calls": outcome.over_budget_calls,
            "made_up_rewards": outcome.made_up_rewards,
            "missing_rewards": outcome.missing_rewards,
            "level_changes": outcome.level_changes,
            "restarts": outcome.restarts,
            "calls": sum(one["calls"] for one in outcome.calls.values()),
        }
    hours = [one.found_hours for one in found.values() if one.found_hours is not None]
    told["false_positive_hours"] = {"planted": planted, "found": hours[-1] if hours else None}
    return told


if __name__ == "__main__":
    sys.exit(main())
