"""Kill everything, again and again, and compare with a run that nobody disturbed.

    python loadtests/chaos.py --seconds 300 --seed 7 --json
    python loadtests/chaos.py --nats-nodes 3 --json

One embedded stack runs the same sessions twice and more: a mix of environments with synchronous
rewards, blocking idempotent tools and anchors. First in peace; then while processes are killed with
SIGKILL (one or two at once), stopped for longer than the heartbeat limit and continued as zombies,
and the object store is away for 20 s: what, when and how long follows from `--seed`. All bounds on
restarts lie above these outages. Every session must end, with the chain hash and the rewards that
it has in peace; each step and reward must be in the log once; and every session must verify.
Exits with 1 where one of this does not hold.

With `--nats-nodes` the bus is a cluster whose every node keeps the stream, and what is disturbed is
that: the node that leads the stream is killed under load, again once it is back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import UUID

import psutil
from sqlalchemy import text

from dsec.client.verification import verify_sessions
from dsec.platform.bus import Bus
from nats_leader import NatsLeader
from rig import ISOLATED, WORKER, Rig, portions, rig, say, write_session

CONFIG = "worker_deaths_max: 100000\nsession_lifecycle: {max_restarts: 1000}\n"
HEARTBEAT_LIMIT_S = 4.0
STOPPED_S = (HEARTBEAT_LIMIT_S + 1, HEARTBEAT_LIMIT_S + 5)
STORE_AWAY_S = 20.0
PAUSE_S = (1.0, 5.0)
"""Between two disturbances."""
TWO_AT_ONCE = 0.2
STOP_SHARE = 0.2
PEACE_S_MAX = 300.0
CALM_S_MAX = 180.0
"""How long sessions may take to end once nothing disturbs them any more."""
POLL_S = 0.5

AGENT = '''
import random


class Agent:
    """Its next action depends on everything that it was told so far."""

    def __init__(self, session_config):
        self.space = session_config["action_space"]
        self.total = 0.0
        self.answer = None
        self.tools = bool(session_config["tools"])
        self.asked = False

    def step(self, observation):
        if self.tools and not self.asked:
            self.asked = True
            arguments = {"x": round(self.total, 3)}
            return {"tool_calls": [{"name": "lookup", "arguments": arguments}]}
        self.asked = False
        action = self.space.sample()
        if random.random() + 0.01 * (self.total % 1) > 0.5:
            action = self.space.sample()
        return {"action": action}

    def on_reward(self, reward, done, info):
        self.total += reward

    def on_tool_result(self, tool_id, result):
        self.total += result["y"]

    def get_state(self):
        return {"total": self.total, "asked": self.asked}

    def set_state(self, state):
        self.total, self.asked = state["total"], state["asked"]
'''
REWARD = """
import dsec


@dsec.reward(weights={"env": 1.0, "length": 0.125})
def shaped(t, services):
    return {"env": float(t.env_reward), "length": 1.0 / (1 + t.step)}
"""
TOOL = """
def lookup(x):
    return {"y": (x * 7 + 1) % 5}
"""
TOOL_SPEC = """\
name: lookup
entry: tools.py:lookup
code: [tools.py]
parameters: {type: object, properties: {x: {type: number}}, required: [x]}
idempotent: true
"""
ENVIRONMENTS = ("CartPole-v1", "FrozenLake-v1", "Pendulum-v1", "Taxi-v4", "Acrobot-v1")
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


def write_mix(directory: Path, max_steps: int) -> list[Path]:
    """One session.yaml for each environment; the first one's agent calls a tool at every step."""
    found = []
    for n, environment in enumerate(ENVIRONMENTS):
        tools = "tools: [{ref: lookup}]\n" if n == 0 else ""
        files = {
            "agent.py": AGENT,
            "reward.py": REWARD,
            "tools.py": TOOL,
            "lookup.yaml": TOOL_SPEC,
            "agent_spec.yaml": "entry: agent.py:Agent\ncode: [agent.py]\n"
            f"anchors: {{every_steps: 10}}\n{tools}",
            "env_spec.yaml": f"entry: gymnasium:{environment}\n",
        }
        reward = "env" if n % 2 else "reward.py:shaped"
        folder = directory / f"case{n}"
        # Calls take their time: fewer steps, so that all cases end at about the same time.
        steps = max_steps // 4 if n == 0 else max_steps
        found.append(write_session(folder, steps, files, reward=reward))
    return found


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
            if one.chain_hash != wanted.chain_hash:
                tally.chain_mismatches += 1
                say(f"  case {key[0]} seed {key[1]}: {one.status} {one.code}, another chain")
            if one.rewards != wanted.rewards:
                tally.reward_mismatches += 1
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


async def run(sessions: int, max_steps: int, seconds: float, seed: int) -> Tally:
    """The scenario."""
    async with rig(config=CONFIG) as stack:
        paths = write_mix(stack.directory, max_steps)
        chaos = Chaos(stack, paths, list(portions(sessions, len(paths))), seed)
        began = time.monotonic()
        expected = await chaos.peace(max(seconds, PEACE_S_MAX))
        say(f"in peace: {len(expected)} sessions in {time.monotonic() - began:.0f} s")
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
    async with rig(config=CONFIG, nats_nodes=nats_nodes) as stack:
        paths = write_mix(stack.directory, max_steps)
        chaos = Chaos(stack, paths, list(portions(sessions, len(paths))), seed)
        tally = chaos.tally
        began = time.monotonic()
        expected = await chaos.peace(PEACE_S_MAX)
        say(f"in peace: {len(expected)} sessions in {time.monotonic() - began:.0f} s")
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
