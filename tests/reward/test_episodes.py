"""The steps of an episode are read from the log, once it has them all."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from uuid import UUID

import psycopg
import pytest
from tests.reward.conftest import observation, session, step_fact, tick

from dsec.platform.log import LogBehind, LogReader
from dsec.reward.batch import Batch
from dsec.reward.episodes import Episodes
from dsec.reward.frames import Failure, Task
from dsec.session.whole_episode import EpisodeStep, unpack_episode
from dsec_contracts import encode
from dsec_contracts.keys import session_time

pytestmark = pytest.mark.postgres

SPEC = "a" * 64
POSITION = 40


def no_blobs(key: str) -> bytes:
    raise AssertionError(f"nothing lies in the object store: {key}")


def log_step(log: psycopg.Connection[tuple[object, ...]], key: str, **row: object) -> None:
    one: UUID = session(0)
    values = {
        "session_id": one,
        "session_at": session_time(one),
        "event_time": datetime.now(UTC),
        "epoch": 1,
        "sequence": 1 + log.execute("select count(*) from event_log").fetchall()[0][0],
        "index": 0,
        "version": 1,
        "key": key,
        "kind": "session.stepped",
        "fact": encode({}),
        "event_id": key,
    } | row
    names = ", ".join(f'"{name}"' for name in values)
    places = ", ".join(["%s"] * len(values))
    log.execute(f"insert into event_log ({names}) values ({places})", list(values.values()))  # type: ignore[call-overload]


def come_to(log: psycopg.Connection[tuple[object, ...]], sequence: int) -> None:
    log.execute(
        "insert into log_floor (epoch, stream_created, sequence) values (1, now(), %s)"
        " on conflict (epoch) do update set sequence = excluded.sequence",
        (sequence,),
    )


def test_an_episode_does_not_begin_behind_its_end() -> None:
    """As a message says that closes two of one session: which of them it means."""
    event = tick([SPEC], step=6)
    for first, expected in ((4, {0: 4}), (6, {0: 6}), (7, {})):
        told = event.circumstance.model_copy(update={"closing": {session(0).hex: first}})
        assert Batch(event.model_copy(update={"circumstance": told})).closing == expected


async def test_the_log_is_waited_for_and_the_steps_are_put_together(log_url: str) -> None:
    batch = Batch(tick([SPEC], step=6))
    reader = await LogReader.connect(log_url)
    with psycopg.connect(log_url, autocommit=True) as log:
        come_to(log, POSITION - 1)
        episodes = Episodes(reader, no_blobs, wait_s=10.0)
        reading = asyncio.create_task(episodes.task(batch, 0, 4, POSITION))
        await asyncio.sleep(0.3)
        assert not reading.done()
        # The step before the episode, whose reset begins it, and those of the episode.
        log_step(
            log, "step:3", step=3, observation=observation(3), reset_observation=observation(9)
        )
        log_step(log, "step:5", step=5, fact=step_fact(5), observation=observation(5))
        log_step(log, "step:4", step=4, fact=step_fact(4), observation=observation(4))
        come_to(log, POSITION)
        task = await reading
        assert isinstance(task, Task)
        assert unpack_episode(task.fact) == [
            EpisodeStep(step_fact(4), observation(9), observation(4)),
            EpisodeStep(step_fact(5), observation(4), observation(5)),
            EpisodeStep(step_fact(6), observation(5), observation(1)),
        ]
        lacking = await episodes.task(batch, 0, 2, POSITION)
        assert isinstance(lacking, Failure)
        assert (lacking.code, "step:1" in lacking.message) == ("step_not_found", True)
        behind = Episodes(reader, no_blobs, wait_s=0.1)
        with pytest.raises(LogBehind):
            await behind.task(batch, 0, 4, POSITION + 1)
    await reader.close()
