"""Changes of the curriculum level on a server: a worker delivers them at the next reset, also when
they came before it had the session, and an attempt that follows finds them in the log."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
from tests.env_runtime.conftest import Code, Row, World, code_of, request_of
from tests.env_runtime.test_late import AGENT, defer, named
from tests.env_runtime.test_worker import heartbeats

from dsec_contracts import CurriculumChanged, SessionEnded
from dsec_contracts.canonical import decode
from dsec_contracts.curriculum import CurriculumCircumstance, CurriculumFact
from dsec_contracts.session import RequestFact

ENV = """
import gymnasium, numpy as np
class Env(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 99, (1,), np.int64)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n, self.level = 0, options["curriculum_level"]
        return np.array([self.level]), {}
    def step(self, action):
        self.n += 1
        return np.array([self.level]), 1.0, self.n == 2, False, {}
"""


def code() -> Code:
    return code_of(AGENT, ENV)


async def change(world: World, request: RequestFact, n: int, level: int) -> None:
    told: dict[str, Any] = {"session_id": request.session_id, "n": n, "level": level}
    event = CurriculumChanged(
        fact=CurriculumFact(**told, previous_level=3),
        circumstance=CurriculumCircumstance(why="threshold"),
    )
    await world.publish(event, request.session_id, session_id=request.session_id)


async def viewed(world: World, request: RequestFact) -> list[tuple[Any, ...]]:
    query = (
        "select n, level, previous_level, why, delivered_at_step from curriculum_change"
        " where session_id = %s order by n"
    )
    async with await psycopg.AsyncConnection.connect(world.database_url) as connection:
        return await (await connection.execute(query, (request.session_id,))).fetchall()


def level_of(row: Row) -> int:
    return int(decode(row.observation)[0])


async def taken(world: World, worker: str = "w1") -> None:
    """Until the worker has read all that is published."""

    async def drained() -> bool:
        for state in await world.bus.consumers():
            if state.name == f"worker-{worker}":
                return state.pending == state.ack_pending == 0
        return False

    async with asyncio.timeout(60):
        while not await drained():  # noqa: ASYNC110 - the server's
            await asyncio.sleep(0.02)


async def test_a_change_is_delivered_at_the_next_reset(world: World) -> None:
    world.record()
    await world.worker(reply_wait_s=60)
    request = await world.run_session(code(), max_steps=6, curriculum_level=3)
    rows = await world.stepped(request.session_id, 1)
    await change(world, request, 1, 2)
    await change(world, request, 2, 5)
    await change(world, request, 1, 2)
    await taken(world)
    world.answering = True
    await world.reward(rows[0])
    await world.ended(request.session_id)
    rows = world.steps(request.session_id)
    assert [level_of(row) for row in rows] == [3, 3, 5, 5, 5, 5]
    assert named(rows[1]) == [("reward", 0), ("curriculum", 2)]
    assert all(("curriculum", 2) not in named(row) for row in rows[2:])
    verdict = await world.verdict(request)
    assert (verdict.first_divergence, verdict.complete) == (None, True)
    assert await viewed(world, request) == [
        (1, 2, 3, "threshold", None),  # the one that followed took its place
        (2, 5, 3, "threshold", 1),
    ]


async def test_a_change_may_come_before_the_worker_has_the_session(world: World) -> None:
    world.record()
    world.answering = True
    await world.worker()
    registered = code()
    await world.register(registered)
    request = request_of(registered, max_steps=4, curriculum_level=3)
    world.codes[str(request.session_id)] = registered
    await change(world, request, 1, 1)
    await taken(world)
    await world.place(request)
    await world.ended(request.session_id)
    assert [level_of(row) for row in world.steps(request.session_id)] == [3, 3, 1, 1]
    assert (await world.verdict(request)).ok


async def test_the_next_attempt_delivers_what_the_log_has(world: World) -> None:
    world.record()
    first = await world.worker(reply_wait_s=60)
    request = await world.run_session(code(), max_steps=6, curriculum_level=3)
    rows = await world.stepped(request.session_id, 1)
    await change(world, request, 1, 2)
    await taken(world)
    await first.close()
    del world.runs["w1"]
    await change(world, request, 2, 0)
    await world.worker("w2", reply_wait_s=60)
    world.answering = True
    await world.place(request, "w2", 2, previous_lane="w1-0")
    await world.until(lambda: request.session_id in world.runs["w2"].worker.roster.seats)
    await world.reward(rows[0], lane="w1-0")
    await world.ended(request.session_id)
    assert [level_of(row) for row in world.steps(request.session_id)] == [3, 3, 0, 0, 0, 0]
    verdict = await world.verdict(request)
    assert (verdict.first_divergence, verdict.complete) == (None, True)


async def test_a_heartbeat_tells_how_far_rewards_are_behind(world: World) -> None:
    world.record()
    await world.worker(reply_wait_s=60)
    request = await world.run_session(
        code(), max_steps=9, curriculum_level=3, reward_lag_steps_max=8
    )
    for n in range(3):
        rows = await world.stepped(request.session_id, n + 1)
        await defer(world, rows[n])
    await world.stepped(request.session_id, 4)
    beats = await heartbeats(world)
    await world.until(lambda: beats and beats[-1].circumstance.steps == [4])
    assert beats[-1].circumstance.reward_lag_steps == [4]
    await world.reward(world.steps(request.session_id)[0])
    await world.until(lambda: beats[-1].circumstance.reward_lag_steps == [3])


async def test_without_a_curriculum_heartbeats_are_what_they_were(world: World) -> None:
    world.record()
    await world.worker(reply_wait_s=60)
    request = await world.run_session(max_steps=2)
    await world.stepped(request.session_id, 1)
    beats = await heartbeats(world)
    await world.until(lambda: beats and beats[-1].circumstance.sessions)
    assert beats[-1].circumstance.reward_lag_steps is None


async def test_an_environment_that_takes_no_options_ends_its_session_with_a_reason(
    world: World,
) -> None:
    world.record()
    await world.worker()
    bare = ENV.replace(", options=None):", "):\n        options = {'curriculum_level': 0}")
    request = await world.run_session(code_of(AGENT, bare), max_steps=2, curriculum_level=3)
    [ended] = [await world.ended(request.session_id)]
    assert isinstance(ended, SessionEnded)
    assert (ended.fact.status, ended.fact.code) == ("failed", "env_invalid")
    assert "takes no options" in ended.circumstance.message
