"""Kill everything, again and again, and compare with a run that nobody disturbed.

    python loadtests/chaos.py --seconds 300 --seed 7 --json
    python loadtests/chaos.py --nats-nodes 3 --json

One embedded stack, with two replicas of the reward and the tool service, runs the same sessions
twice and more (`chaos_mix.py`): environments with rewards and blocking tools that answer at once,
rewards that ask an outside service, tools that do not block, and anchors. First in peace; then
while processes are killed with SIGKILL (one or two at once), stopped for longer than the heartbeat
limit and continued as zombies, the object store is away for 20 s, and the outside service is slow
for seconds, so that its rewards are deferred and again not: what, when and how long follows from
`--seed`. All bounds on restarts lie above these outages. Every session must end, with the chain
hash and the rewards that it has in peace (where late rewards and results come without `lag_steps`:
with the rewards); each step and reward must be in the log once; and every session must verify.
Exits with 1 where one of this does not hold. `deferred` says how many rewards were: with none, the
mode never switched.

With `--nats-nodes` the bus is a cluster whose every node keeps the stream, and what is disturbed is
that: the node that leads the stream is killed under load, again once it is back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import UUID

import psutil
from sqlalchemy import text

from chaos_mix import CASES, SERVICE, write_mix
from dsec.client.services_file import declare
from dsec.client.verification import verify_sessions
from dsec.platform.bus import Bus
from dsec_contracts.service import ServiceRetry, ServiceTerms
from nats_leader import NatsLeader
from rig import ISOLATED, WORKER, Rig, portions, rig, say
from slow_service import SlowService, slow_service

REPLICAS = {"reward": 2, "tool": 2}
CONFIG = "worker_deaths_max: 100000\nsession_lifecycle: {max_restarts: 1000}\n"
HEARTBEAT_LIMIT_S = 4.0
STOPPED_S = (HEARTBEAT_LIMIT_S + 1, HEARTBEAT_LIMIT_S + 5)
STORE_AWAY_S = 20.0
PAUSE_S = (1.0, 5.0)
"""Between two disturbances."""
TWO_AT_ONCE = 0.2
SERVICE_QPS_BUDGET = 300.0
SERVICE_CONCURRENCY_MAX = 64
SERVICE_DEADLINE_S = 600.0
SERVICE_ATTEMPT_S_MAX = 30.0
STOP_SHARE = 0.2
PEACE_S_MAX = 300.0
CALM_S_MAX = 180.0
"""How long sessions may take to end once nothing disturbs them any more."""
POLL_S = 0.5

TARGETS = (
    WORKER,
    "scheduler",
    "reward",
    "tool",
    "anchor-sync",
    "recorder",
    "env-runtime",
    "nats-server",
    "postgres",
)
STOPPABLE = (WORKER, "scheduler", "reward", "tool", "recorder")


@dataclass(frozen=True)
class Outcome:
    """What one session came to. Two runs of it must agree in all of this."""

    status: str
    code: str | None
    steps: int
    chain_hash: str
    rewards: tuple[float, ...]


@dataclass
class Tally:
    """What was found so far."""

    sessions: int = 0
    kills: int = 0
    stops: int = 0
    store_outages: int = 0
    lost: int = 0
    doubled: int = 0
    conflicts: int = 0
    chain_mismatches: int = 0
    reward_mismatches: int = 0
    unfinished: int = 0
    unverified: int = 0
    restarts: int = 0
    deferred: int = 0
    """Rewards that were said to come later, because the service was slow."""
    killed: Counter[str] = field(default_factory=Counter)
    elections_s: list[float] = field(default_factory=list)
    """From the death of the node that led the stream to the first message that another one took."""

    @property
    def ok(self) -> bool:
        """Whether nothing was lost, doubled or changed."""
        return not (
            self.lost
            + self.doubled
            + self.conflicts
            + self.chain_mismatches
            + self.reward_mismatches
            + self.unfinished
            + self.unverified
        )


Key = tuple[int, int | None]


class Chaos:
    """Sessions on a stack, and what disturbs it."""

    def __init__(self, stack: Rig, sessions: list[Path], counts: list[int], seed: int) -> None:
        self._stack = stack
        self._sessions = sessions
        self._counts = counts
        self._random = random.Random(seed)
        self._bag: list[str] = []
        self.tally = Tally()

    # -- sessions ------------------------------------------------------------------------------

    async def request(self) -> dict[UUID, int]:
        """Request every session of the mix; returns which case each is of."""
        ids: dict[UUID, int] = {}
        for case, (session, count) in enumerate(zip(self._sessions, self._counts, strict=True)):
            group = await self._stack.client.request(session, count=count)
            ids |= dict.fromkeys(group.session_ids, case)
        return ids

    async def outcomes(self, ids: dict[UUID, int]) -> dict[Key, Outcome]:
        """What sessions came to, by case and seed."""
        found: dict[Key, Outcome] = {}
        async with self._stack.engine.connect() as connection:
            rows = await connection.execute(
                text(
                    "select session_id, array_agg(value order by step) from event_log "
                    "where session_id = any(:ids) and kind = 'reward.scored' group by 1"
                ),
                {"ids": list(ids)},
            )
            rewards = {session_id: tuple(values) for session_id, values in rows}
        for one in await self._stack.client.queries.summaries(list(ids)):
            key = ids[one.session_id], one.seed
            found[key] = Outcome(
                one.status, one.code, one.steps, one.chain_hash, rewards.get(one.session_id, ())
            )
        return found

    async def peace(self, wait_s: float) -> dict[Key, Outcome]:
        """The sessions with nothing in their way."""
        ids = await self.request()
        await self._stack.client.wait(list(ids), timeout_s=wait_s)
        found = await self.outcomes(ids)
        bad = {key: one for key, one in found.items() if one.status != "completed"}
        if bad:
            raise SystemExit(f"sessions fail in peace: {bad}")
        return found

    async def round(
        self,
        expected: dict[Key, Outcome],
        disturb: Callable[[Callable[[], bool]], Awaitable[None]],
        enough: Callable[[], bool],
    ) -> None:
        """The same sessions once more, disturbed until they end or it is enough."""
        ids = await self.request()
        done = asyncio.create_task(self._ended(ids))
        while not enough():
            await asyncio.wait([done], timeout=self._random.uniform(*PAUSE_S))
            if done.done():
                break
            await disturb(lambda: not done.done())
        try:
            async with asyncio.timeout(CALM_S_MAX):
                await done
        except TimeoutError:
            say("sessions have not ended")
        await self._compare(ids, expected)

    async def _ended(self, ids: dict[UUID, int]) -> None:
        """Until all are over. The database is killed too, so asking fails now and then."""
        while True:
            try:
                await self._stack.client.wait(list(ids))
            except Exception as error:  # noqa: BLE001 - whatever the driver makes of a dead server
                say(f"  asking again: {type(error).__name__}")
                await asyncio.sleep(POLL_S)
            else:
                return

    async def _compare(self, ids: dict[UUID, int], expected: dict[Key, Outcome]) -> None:
        tally = self.tally
        tally.sessions += len(ids)
        found = await self.outcomes(ids)
        for key, wanted in expected.items():
            one = found[key]
            if one.status not in ("completed", "failed", "cancelled", "rejected"):
                tally.unfinished += 1
                say(f"  case {key[0]} seed {key[1]}: {one.status} after {one.steps} steps")
                continue
            repeats = CASES[key[0]].repeatable
            if one.chain_hash != wanted.chain_hash and (repeats or one.status != wanted.status):
                tally.chain_mismatches += 1
                say(f"  case {key[0]} seed {key[1]}: {one.status} {one.code}, another chain")
            if one.rewards != wanted.rewards:
                tally.reward_mismatches += 1
                say(f"  case {key[0]} seed {key[1]}: other rewards")
        steps = sum(one.steps for one in expected.values())
        some = {"ids": list(ids)}
        for kind in ("session.stepped", "reward.scored"):
            some["kind"] = kind  # type: ignore[assignment]
            where = "from event_log where session_id = any(:ids) and kind = :kind"
            rows = await self._stack.scalar(f"select count(*) {where}", **some)
            once = await self._stack.scalar(
                f"select count(*) from (select distinct session_id, step {where}) s", **some
            )
            tally.lost += steps - once
            tally.doubled += rows - once
        tally.conflicts += await self._stack.scalar(
            "select count(*) from event_aside where session_id = any(:ids) "
            "and verdict = 'conflict'",
            ids=list(ids),
        )
        tally.restarts += await self._stack.scalar(
            "select count(*) from event_log where session_id = any(:ids) "
            "and kind = 'session.placed' and attempt > 1",
            ids=list(ids),
        )
        tally.deferred += await self._stack.scalar(
            "select count(*) from event_log where session_id = any(:ids) "
            "and kind = 'reward.deferred'",
            ids=list(ids),
        )
        verdicts = await verify_sessions(self._stack.client, list(ids))
        wrong = [verdict for verdict in verdicts if not verdict["ok"]]
        for verdict in wrong[:3]:
            say(f"  does not verify: {verdict}")
        tally.unverified += len(wrong)

    # -- what disturbs them --------------------------------------------------------------------

    async def disturb(self, _loaded: Callable[[], bool]) -> None:
        """One disturbance, or two at once."""
        chance = self._random
        if self.tally.kills >= 10 * (self.tally.store_outages + 1):
            await self._store_away()
            return
        for _ in range(2 if chance.random() < TWO_AT_ONCE else 1):
            if chance.random() < STOP_SHARE:
                await self._stop(chance.choice(STOPPABLE), chance.uniform(*STOPPED_S))
            else:
                self._kill(self._next_target())

    async def kill_leader(self, leader: NatsLeader, loaded: Callable[[], bool]) -> None:
        """The node that leads the stream is killed, and another one takes over. It counts only
        where there was something for that one to take."""
        seconds = await leader.kill(loaded)
        if seconds is None:
            say("  the sessions had ended by then: not under load")
            return
        self.tally.elections_s.append(round(seconds, 1))
        self.tally.kills += 1
        self.tally.killed["stream leader"] += 1

    def _next_target(self) -> str:
        """Each in turn, in an order of chance: all of them several times."""
        if not self._bag:
            self._bag = list(TARGETS)
            self._random.shuffle(self._bag)
        return self._bag.pop()

    def _one(self, name: str) -> psutil.Process | None:
        running = self._stack.processes()
        some = running.get(name, []) + (running.get(ISOLATED, []) if name == WORKER else [])
        return self._random.choice(sorted(some, key=lambda p: p.pid)) if some else None

    def _kill(self, name: str) -> None:
        process = self._one(name)
        if process is None:
            say(f"  {name} does not run at the moment")
            return
        say(f"  kill {name}")
        process.kill()
        self.tally.kills += 1
        self.tally.killed[name] += 1

    async def _stop(self, name: str, seconds: float) -> None:
        process = self._one(name)
        if process is None:
            return
        say(f"  stop {name} for {seconds:.1f} s")
        process.suspend()
        self.tally.stops += 1
        await asyncio.sleep(seconds)
        try:
            process.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            return

    async def _store_away(self) -> None:
        place = Path(unquote(urlsplit(self._stack.endpoints.object_store_url).path))
        say(f"  the object store is away for {STORE_AWAY_S:g} s")
        self.tally.store_outages += 1
        away = place.rename(place.with_name(place.name + ".away"))
        place.touch()  # in its place, or whoever writes would make it anew
        await asyncio.sleep(STORE_AWAY_S)
        place.unlink()
        away.rename(place)


@contextlib.asynccontextmanager
async def prepared(
    sessions: int, max_steps: int, seed: int, peace_s: float, nats_nodes: int = 1
) -> AsyncIterator[tuple[Chaos, dict[Key, Outcome], Rig]]:
    """A stack on which the sessions ran once in peace, what they came to, and a service that is
    slow now and then from now on."""
    async with (
        rig(config=CONFIG, nats_nodes=nats_nodes, replicas=REPLICAS) as stack,
        slow_service(seed) as service,
    ):
        await declare_service(stack, service)
        paths = list(write_mix(stack.directory, max_steps))
        chaos = Chaos(stack, paths, list(portions(sessions, len(paths))), seed)
        began = time.monotonic()
        expected = await chaos.peace(peace_s)
        say(f"in peace: {len(expected)} sessions in {time.monotonic() - began:.0f} s")
        service.begin()
        yield chaos, expected, stack
        await service.end()
        say(f"the service saw {service.seen}")


async def declare_service(stack: Rig, service: SlowService) -> None:
    """It is waited for, however long reward replicas are stopped: no reward may be missing."""
    terms = ServiceTerms(
        base_url=service.url,
        qps_budget=SERVICE_QPS_BUDGET,
        concurrency_max=SERVICE_CONCURRENCY_MAX,
        deadline_s=SERVICE_DEADLINE_S,
        attempt_s_max=SERVICE_ATTEMPT_S_MAX,
        retry=ServiceRetry(attempts_max=100),
    )
    client = stack.client
    await declare(await client.bus(), await client.log(), SERVICE, terms, "chaos")


async def run(sessions: int, max_steps: int, seconds: float, seed: int) -> Tally:
    """The scenario."""
    peace_s = max(seconds, PEACE_S_MAX)
    async with prepared(sessions, max_steps, seed, peace_s) as (chaos, expected, _):
        until_s = time.monotonic() + seconds

        def over() -> bool:
            return time.monotonic() >= until_s

        while not over():
            await chaos.round(expected, chaos.disturb, over)
            say(f"after {chaos.tally.kills} kills: {chaos.tally}")
        return chaos.tally


async def run_on_cluster(
    sessions: int, max_steps: int, seed: int, nats_nodes: int, leader_kills: int
) -> Tally:
    """The scenario on a NATS cluster."""
    ready = prepared(sessions, max_steps, seed, PEACE_S_MAX, nats_nodes)
    async with ready as (chaos, expected, stack):
        tally = chaos.tally
        bus = await Bus.connect(stack.endpoints.nats_url, "chaos")
        try:
            leader = NatsLeader(stack, bus)
            while tally.kills < leader_kills:
                await chaos.round(
                    expected,
                    lambda loaded: chaos.kill_leader(leader, loaded),
                    lambda: tally.kills >= leader_kills,
                )
                say(f"after {tally.kills} kills: {tally}")
        finally:
            await bus.close()
        return tally


def main() -> int:
    """Run it as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=300, help="how long to disturb")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--nats-nodes", type=int, default=1, help="3: a cluster, and its leader")
    parser.add_argument("--leader-kills", type=int, default=2, help="of a cluster")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    say(f"seed {arguments.seed}")
    mix = arguments.sessions, arguments.max_steps
    if arguments.nats_nodes > 1:
        on_cluster = run_on_cluster(
            *mix, arguments.seed, arguments.nats_nodes, arguments.leader_kills
        )
        tally = asyncio.run(on_cluster)
    else:
        tally = asyncio.run(run(*mix, arguments.seconds, arguments.seed))
    result = {"ok": tally.ok, "seed": arguments.seed, **vars(tally)}
    print(json.dumps(result) if arguments.json else result)
    return 0 if tally.ok else 1


if __name__ == "__main__":
    sys.exit(main())
