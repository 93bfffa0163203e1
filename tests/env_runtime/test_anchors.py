"""Anchors through lanes, anchor-sync and the log, and the restarts that begin at them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.env_runtime.conftest import Code, World, code_of, request_of

from dsec.anchor_sync.handlers import Keeper
from dsec.anchor_sync.settings import AnchorSyncSettings
from dsec.env_runtime import anchors as outbox
from dsec.platform import objects
from dsec.platform.bus import Message
from dsec.platform.clock import utc_now
from dsec.platform.log import LogReader
from dsec.platform.objects import ObjectStore
from dsec.session.documents import EnvDocument, seal
from dsec.session.log_row import ANCHOR_LOST, ANCHOR_STORED, LogRow, circumstance_map, fact_map
from dsec_contracts import AnchorCaptured, SessionEnded, SessionReleased, SessionResumed
from dsec_contracts.session import RequestFact, ResumedCircumstance

pytestmark = [pytest.mark.nats, pytest.mark.postgres]

AGENT = """
import numpy as np
class Agent:
    def __init__(self, config):
        self.space, self.sums = config["action_space"], np.zeros(4)
        self.ballast = np.random.default_rng(1).bytes(config["params"].get("ballast", 0))
    def step(self, observation):
        self.sums += observation[:4]
        return {"action": int(self.space.sample() + self.sums.sum()) % 2}
    def get_state(self):
        return {"sums": self.sums.copy(), "ballast": self.ballast}
    def set_state(self, state):
        self.sums, self.ballast = state["sums"], state["ballast"]
"""
FORGETFUL = AGENT.replace('"sums": self.sums.copy()', '"sums": np.zeros(4)')
ENV = """
import time, gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Env(CartPoleEnv):
    def __init__(self, step_s=0.0, slow_from=0, unpicklable=False):
        super().__init__()
        self.step_s, self.slow_from, self.steps = step_s, slow_from, 0
        if unpicklable:
            self.screen = lambda: None
    def step(self, action):
        self.steps += 1
        if self.steps > self.slow_from:
            time.sleep(self.step_s)
        return super().step(action)
"""
EVERY, STEPS, KILLED_AT = 7, 60, 45


class Rig:
    """A world with a recorder, rewards, an object store and anchor-sync."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.objects = folder / "objects"
        self.objects.mkdir()
        self.url = self.objects.as_uri()
        self.captured: list[AnchorCaptured] = []

    async def start(self) -> None:
        """Everything but workers."""
        self.world.record()
        self.world.answering = True
        settings = AnchorSyncSettings(object_store_url=self.url, anchor_absent_s_max=0.2)
        store = ObjectStore(settings.object_store_url)
        self.keeper = keeper = Keeper(self.world.bus, store, settings, utc_now)
        consumer = await self.world.bus.consumer("anchor-sync", ["dsec.anchor.captured.*"])

        async def sync() -> None:
            while True:
                for message in await consumer.fetch(1, 0.5):
                    self._saw(message)
                    await keeper.on_anchor_captured(message)

        self.world.spawn(sync())

    def _saw(self, message: Message) -> None:
        event = message.event()
        assert isinstance(event, AnchorCaptured)
        if message.delivered == 1:
            self.captured.append(event)

    async def worker(self, name: str, **settings: Any) -> None:
        """A worker that reaches the object store."""
        await self.world.worker(name, object_store_url=self.url, **settings)

    async def rows(self, session_id: UUID, kind: str) -> list[LogRow]:
        """What the log has of a kind, once it has all that is published now."""
        reader = await LogReader.connect(self.world.database_url)
        await reader.wait_floor((await self.world.bus.stream_state()).last_sequence, 60)
        rows = [row for row in await reader.rows(session_id) if row.kind == kind]
        await reader.close()
        return rows

    async def positions(self, request: RequestFact) -> list[int]:
        """Where the log has stored anchors."""
        rows = await self.rows(request.session_id, ANCHOR_STORED)
        return sorted(fact_map(row)["position"] for row in rows)

    async def killed(self, code: Code, **request: Any) -> tuple[RequestFact, list[int]]:
        """A session whose worker died at a step, and the anchors that are stored of it."""
        await self.worker("w1")
        asked = await self.world.run_session(code, **request)
        await self.world.stepped(asked.session_id, KILLED_AT)
        await self.world.runs["w1"].close()
        return asked, await self.stored(asked, KILLED_AT - 1)

    async def stored(self, request: RequestFact, upto: int) -> list[int]:
        """Where anchors are stored, once those up to a position are."""
        want = set(range(EVERY, upto + 1, EVERY))
        async with asyncio.timeout(60):
            while True:
                if want <= set(found := await self.positions(request)):
                    return found
                await asyncio.sleep(0.1)

    async def come_back(self, request: RequestFact) -> ResumedCircumstance:
        """Place it on another worker, wait for its end, and check it against an undisturbed run."""
        await self.worker("w2")
        await self.world.place(request, "w2", attempt=2, previous_lane="w1-0")
        ended = await self.world.ended(request.session_id)
        assert ended.fact.status == "completed", ended
        code = self.world.codes[str(request.session_id)]
        again = request_of(code, max_steps=request.max_steps)
        self.world.codes[str(again.session_id)] = code
        await self.world.place(again, "w2")
        undisturbed = await self.world.ended(again.session_id)
        assert ended.fact.chain == undisturbed.fact.chain
        for one in (request, again):
            verdict = await self.world.verdict(one)
            assert verdict.ok, verdict
        assert await self.facts(request) == await self.facts(again)
        (resumed,) = self.world.events(SessionResumed, request.session_id)
        told: ResumedCircumstance = resumed.circumstance
        return told

    async def facts(self, request: RequestFact) -> list[tuple[str, dict[str, Any]]]:
        """The anchors of a session, without its id."""
        rows = await self.rows(request.session_id, "anchor.captured")
        found = [(row.key, fact_map(row)) for row in rows]
        return sorted(
            (key, {k: v for k, v in fact.items() if k != "session_id"}) for key, fact in found
        )


@pytest.fixture
async def rig(world: World, tmp_path: Path) -> Rig:
    made = Rig(world, tmp_path)
    await made.start()
    return made


def code(
    agent: str = AGENT, *, step_s: float = 0.01, slow_from: int = KILLED_AT - 1, **options: Any
) -> Code:
    """A program whose steps take long from where its worker is to die in their midst."""
    kwargs = {"step_s": step_s, "slow_from": slow_from} | options.pop("kwargs", {})
    return code_of(agent, ENV, anchors={"every_steps": EVERY}, kwargs=kwargs, **options)


async def test_a_restart_begins_at_the_newest_anchor(rig: Rig) -> None:
    request, stored = await rig.killed(code(), max_steps=STEPS)
    told = await rig.come_back(request)
    assert told.from_step == stored[-1]
    assert told.from_step > KILLED_AT - 2 * EVERY
    assert (told.misses, told.worker) == ([], "w2")
    assert told.steps_recorded >= KILLED_AT
    assert await rig.positions(request) == list(range(EVERY, STEPS + 1, EVERY))
    assert await rig.rows(request.session_id, ANCHOR_LOST) == []
    # What travels in the event is not logged.
    rows = await rig.rows(request.session_id, "anchor.captured")
    assert {circumstance_map(row)["data"] for row in rows} == {""}


async def test_a_missing_and_a_damaged_blob_are_passed_over_and_said(rig: Rig) -> None:
    request, stored = await rig.killed(code(), max_steps=STEPS)
    rows = await rig.rows(request.session_id, ANCHOR_STORED)
    blobs = {fact_map(row)["position"]: fact_map(row)["blob"] for row in rows}
    newest, before = (rig.objects / blobs[n][:2] / blobs[n] for n in (stored[-1], stored[-2]))
    newest.unlink()
    before.write_bytes(before.read_bytes()[:-1] + b"?")
    told = await rig.come_back(request)
    assert told.from_step == stored[-3]
    assert [(miss.position, miss.code) for miss in told.misses] == [
        (stored[-1], "blob_missing"),
        (stored[-2], "blob_damaged"),
    ]


async def test_without_any_blob_it_begins_at_step_0(rig: Rig) -> None:
    request, stored = await rig.killed(code(), max_steps=STEPS)
    for path in list(rig.objects.rglob("*")):
        if path.is_file():
            path.unlink()
    told = await rig.come_back(request)
    assert (told.from_step, told.anchor_id) == (0, None)
    assert [miss.position for miss in told.misses] == stored[:-4:-1]


async def test_an_agent_whose_state_is_not_all_there_is_executed_again(rig: Rig) -> None:
    request, _ = await rig.killed(code(FORGETFUL), max_steps=STEPS)
    told = await rig.come_back(request)
    assert told.from_step == 0
    assert {miss.code for miss in told.misses} == {"not_restorable"}
    assert "differs from the log" in told.misses[0].message


async def test_a_large_blob_lies_in_the_store_before_its_event(rig: Rig) -> None:
    size = 2 * outbox.INLINE_BYTES_MAX
    request, stored = await rig.killed(code(params={"ballast": size}), max_steps=STEPS)
    assert all(not event.circumstance.data for event in rig.captured)
    assert all(event.circumstance.size_bytes > size for event in rig.captured)
    assert (await rig.come_back(request)).from_step == stored[-1]


@pytest.mark.s3
async def test_in_a_bucket_too(world: World, tmp_path: Path, s3_url: str) -> None:
    rig = Rig(world, tmp_path)
    rig.url = s3_url
    await rig.start()
    size = 2 * outbox.INLINE_BYTES_MAX
    request, stored = await rig.killed(code(params={"ballast": size}), max_steps=STEPS)
    assert (await rig.come_back(request)).from_step == stored[-1]


async def test_a_lane_that_holds_too_much_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "HELD_BYTES_MAX", 1)
    rig.objects.rmdir()
    rig.objects.write_text("not mounted")
    await rig.worker("w1")
    large = code(params={"ballast": 2 * outbox.INLINE_BYTES_MAX}, step_s=0.0)
    request = await rig.world.run_session(large, max_steps=STEPS)
    await rig.world.stepped(request.session_id, EVERY)
    await asyncio.sleep(1.0)
    assert len(rig.world.steps(request.session_id)) == EVERY
    rig.objects.unlink()
    rig.objects.mkdir()
    assert (await rig.world.ended(request.session_id)).fact.steps == STEPS


async def test_what_is_handed_back_has_its_anchors_before(rig: Rig) -> None:
    rig.objects.rmdir()
    rig.objects.write_text("not mounted")
    await rig.worker("w1")
    large = code(params={"ballast": 2 * outbox.INLINE_BYTES_MAX}, slow_from=EVERY)
    request = await rig.world.run_session(large, max_steps=STEPS)
    await rig.world.stepped(request.session_id, 2 * EVERY)
    rig.world.runs["w1"].stop.set()
    await asyncio.sleep(1.0)
    assert not rig.world.events(SessionReleased, request.session_id)
    rig.objects.unlink()
    rig.objects.mkdir()
    await rig.world.released(request.session_id)
    told = await rig.come_back(request)
    (released,) = await rig.rows(request.session_id, "session.released")
    before = [
        row
        for row in await rig.rows(request.session_id, "anchor.captured")
        if row.sequence < released.sequence
    ]
    assert len(before) == told.steps_recorded // EVERY >= 2


async def test_a_store_that_is_away_holds_up_no_step_and_loses_nothing(rig: Rig) -> None:
    rig.objects.rmdir()
    rig.objects.write_text("not mounted")
    await rig.worker("w1")
    large = code(params={"ballast": 2 * outbox.INLINE_BYTES_MAX}, step_s=0.0)
    small = code(step_s=0.0)
    requests = [await rig.world.run_session(one, max_steps=STEPS) for one in (large, small)]
    for request in requests:
        await rig.world.stepped(request.session_id, STEPS)
    # The end of the one waits for its anchors, that of the other for nothing but the bus.
    await rig.world.ended(requests[1].session_id)
    assert not rig.world.events(SessionEnded, requests[0].session_id)
    rig.objects.unlink()
    rig.objects.mkdir()
    await rig.world.ended(requests[0].session_id)
    for request in requests:
        assert await rig.stored(request, STEPS) == list(range(EVERY, STEPS + 1, EVERY))
        assert await rig.rows(request.session_id, ANCHOR_LOST) == []


async def test_a_store_that_stays_away_is_waited_for_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PUT_WAIT_S_MAX", 3.0)
    rig.objects.rmdir()
    rig.objects.write_text("not mounted")
    await rig.worker("w1")
    large = code(params={"ballast": 2 * outbox.INLINE_BYTES_MAX}, step_s=0.0)
    request = await rig.world.run_session(large, max_steps=STEPS)
    await rig.world.stepped(request.session_id, STEPS)
    anchors = STEPS // EVERY
    assert anchors >= 8
    async with asyncio.timeout(3.0 * anchors / 2):  # and not once an anchor
        assert (await rig.world.ended(request.session_id)).fact.status == "completed"
    await rig.world.until(lambda: rig.keeper.lost == anchors)


async def test_an_environment_that_cannot_be_captured_is_said_and_runs_on(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.worker("w1")
    request = await rig.world.run_session(
        code(step_s=0.0, kwargs={"unpicklable": True}), max_steps=STEPS
    )
    assert (await rig.world.ended(request.session_id)).fact.status == "completed"
    await rig.world.until(lambda: rig.keeper.lost)
    lost = await rig.rows(request.session_id, ANCHOR_LOST)
    assert fact_map(lost[0])["code"] == "not_captured"
    assert "environment cannot be pickled" in circumstance_map(lost[0])["message"]
    said = [one for one in caplog.records if "A restart re-executes" in one.getMessage()]
    assert len(said) == 1, "once a session, and not in the session's own time"
    assert abs(said[0].created - time.time()) < 600
    assert (await rig.world.verdict(request)).ok


async def test_an_end_comes_behind_its_anchors(rig: Rig) -> None:
    await rig.worker("w1")
    request = await rig.world.run_session(code(step_s=0.0), max_steps=EVERY)
    await rig.world.ended(request.session_id)
    (captured,) = await rig.rows(request.session_id, "anchor.captured")
    (step,) = [
        row
        for row in await rig.rows(request.session_id, "session.stepped")
        if row.step == EVERY - 1
    ]
    (ended,) = await rig.rows(request.session_id, "session.ended")
    assert step.sequence < captured.sequence < ended.sequence


async def test_an_agent_that_is_not_executed_again_comes_back_from_its_anchor(rig: Rig) -> None:
    request, stored = await rig.killed(code(deterministic_mode=False), max_steps=STEPS)
    await rig.worker("w2")
    await rig.world.place(request, "w2", attempt=2, previous_lane="w1-0")
    ended = await rig.world.ended(request.session_id)
    (resumed,) = rig.world.events(SessionResumed, request.session_id)
    assert (ended.fact.status, resumed.circumstance.from_step) == ("completed", stored[-1])
    assert (await rig.world.verdict(request)).ok


ROLLS = b"""
import gymnasium, numpy as np
class Env(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Box(0, 255, (4,), np.uint8)
    def reset(self, *, seed=None, options=None):
        self.roll = self.rolled()
        return self.roll, {}
    def step(self, action):
        self.roll = self.rolled()
        return self.roll, float(self.roll[0]), False, False, {}
    def rolled(self):
        with open("/dev/urandom", "rb") as dice:
            return np.frombuffer(dice.read(4), np.uint8).copy()
"""


def chancy(**options: Any) -> Code:
    """A program whose environment is not executed again."""
    document = EnvDocument(entry="env.py:Env", deterministic_mode=False)
    return Code(code_of(AGENT, **options).agent, seal("env", document, {"env.py": ROLLS}))


async def rolled(rig: Rig, steps: int) -> RequestFact:
    """A session in an environment of chance, with an anchor every second step, that lost its worker
    when it waited for the reward of step `steps - 1`."""
    rig.world.answering = False
    await rig.worker("w1")
    request = await rig.world.run_session(chancy(anchors={"every_steps": 2}), max_steps=9)
    for n in range(1, steps):
        await rig.world.reward((await rig.world.stepped(request.session_id, n))[n - 1])
    await rig.world.stepped(request.session_id, steps)
    async with asyncio.timeout(60):
        while len(await rig.positions(request)) < steps // 2:  # noqa: ASYNC110 - the log's
            await asyncio.sleep(0.1)
    await rig.world.runs["w1"].close()
    return request


async def again(rig: Rig, request: RequestFact, steps: int) -> SessionEnded:
    """What becomes of it on another worker, where every step is rewarded."""
    await rig.worker("w2")
    rig.world.answering = True
    await rig.world.place(request, "w2", attempt=2, previous_lane="w1-0")
    await rig.world.reward(rig.world.steps(request.session_id)[steps - 1])
    return await rig.world.ended(request.session_id)


async def test_what_is_not_executed_again_goes_on_from_an_anchor_at_its_tail(rig: Rig) -> None:
    request = await rolled(rig, steps=4)
    ended = await again(rig, request, steps=4)
    assert (ended.fact.status, ended.fact.steps) == ("completed", 9)
    (resumed,) = rig.world.events(SessionResumed, request.session_id)
    assert resumed.circumstance.from_step == resumed.circumstance.steps_recorded == 4
    verdict = await rig.world.verdict(request)
    assert (verdict.ok, verdict.complete, verdict.determinism) == (True, True, "D0")
    (started,) = await rig.rows(request.session_id, "session.started")
    assert circumstance_map(started)["determinism"] == "D0"


async def test_what_is_not_executed_again_and_has_no_such_anchor_is_not_resumable(rig: Rig) -> None:
    request = await rolled(rig, steps=5)
    ended = await again(rig, request, steps=5)
    assert (ended.fact.status, ended.fact.code) == ("failed", "not_resumable")
    assert ended.fact.steps == 5, "what the log has counts"
    assert "no anchor right behind the last recorded step" in ended.circumstance.message
    assert not rig.world.events(SessionResumed, request.session_id)
    verdict = await rig.world.verdict(request)
    assert (verdict.ok, verdict.complete, verdict.steps) == (True, True, 5)


async def test_an_anchor_that_cannot_be_had_is_named_where_nothing_else_is_left(rig: Rig) -> None:
    request = await rolled(rig, steps=4)
    for path in [path for path in rig.objects.rglob("*") if path.is_file()]:
        path.unlink()
    ended = await again(rig, request, steps=4)
    assert ended.fact.code == "not_resumable"
    assert "anchor 4: blob_missing" in ended.circumstance.message
    assert (await rig.world.verdict(request)).ok


async def test_what_is_not_executed_again_begins_if_it_never_began(rig: Rig) -> None:
    await rig.worker("w2")
    played = chancy()
    await rig.world.register(played)
    request = request_of(played, max_steps=3)
    await rig.world.place(request, "w2", attempt=2)
    assert (await rig.world.ended(request.session_id)).fact.status == "completed"
