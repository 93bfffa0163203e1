"""Tool calls of a worker on real servers. The test plays the tool service."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.env_runtime.conftest import World, code_of, request_of, world_on

from dsec.env_runtime import results
from dsec.env_runtime.call_counts import CallCounts
from dsec.env_runtime.ends import UNPUBLISHABLE
from dsec.platform.bus import Message
from dsec.platform.objects import ObjectStore
from dsec.session.documents import ToolUse
from dsec.session.io import Call, Called, result_input
from dsec.session.stored_results import StoredResult
from dsec_contracts import ToolCalled, ToolFailed, ToolReturned, encode
from dsec_contracts.tool import ToolFailedFact, ToolReturnedFact

pytestmark = [pytest.mark.nats, pytest.mark.postgres]

TOOL = ToolUse(ref="a" * 64, name="add", deadline_s=1.5)
AGENT = """
class Agent:
    def __init__(self, config):
        self.asked, self.total = 0, 0
    def step(self, observation):
        self.asked += 1
        call = {"name": "add", "arguments": {"n": self.asked}}
        if self.asked % 3 == 1:
            return {"tool_calls": [call, call]}
        if self.asked % 3 == 2:
            return {"action": self.total % 2, "tool_calls": [call]}
        return {"action": self.total % 2}
    def on_tool_result(self, tool_id, result):
        self.total += result["sum"] if "sum" in result else 100
"""
CODE = code_of(AGENT, tools=[TOOL], tool_calls_max=100)


class Tools:
    """What a world's sessions call, and the answers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.called: list[tuple[Message, ToolCalled]] = []
        self.answering = False
        self.store: ObjectStore | None = None
        """Where results go, if not with their messages."""
        world.spawn(self._follow())

    async def _follow(self) -> None:
        consumer = await self.world.bus.consumer("test-tools", ["dsec.tool.called.*"], ack="none")
        while True:
            for message in await consumer.fetch(100, 0.5):
                event = message.event()
                assert isinstance(event, ToolCalled)
                self.called.append((message, event))
                if self.answering:
                    await self.answer(event)

    def of(self, session_id: UUID) -> list[ToolCalled]:
        return [event for _, event in self.called if event.fact.session_id == session_id]

    async def until_called(self, session_id: UUID, count: int) -> list[ToolCalled]:
        await self.world.until(lambda: len(self.of(session_id)) >= count)
        return self.of(session_id)

    async def answer(self, event: ToolCalled, lane: str = "") -> None:
        """Answer a turn, the last call first."""
        fact = event.fact
        for index in reversed(range(len(fact.calls))):
            about: dict[str, Any] = {
                "session_id": fact.session_id,
                "step": fact.step,
                "turn": fact.turn,
                "index": index,
                "turn_hash": fact.turn_hash,
            }
            answer: ToolFailed | ToolReturned
            if index == 1:
                answer = ToolFailed(fact=ToolFailedFact(**about, code="c", message="m"))
            else:
                content = encode({"sum": len(fact.calls[0].function.arguments)})
                blob = None
                if self.store is not None:
                    blob, content = self.store.put(content), b""
                answer = ToolReturned(fact=ToolReturnedFact(**about, content=content, blob=blob))
            await self.world.publish(
                answer, lane or event.circumstance.lane, session_id=fact.session_id
            )


def counts_of(turns: list[ToolCalled]) -> list[tuple[int, int]]:
    """Calls of the tool, and of all, before each turn."""
    told = [turn.circumstance for turn in turns]
    return [(one.tools["add"].calls_before, one.calls_before) for one in told]


async def test_a_session_calls_hears_and_verifies(world: World) -> None:
    world.record()
    world.answering = True
    tools = Tools(world)
    tools.answering = True
    await world.worker()
    request = await world.run_session(CODE, max_steps=4)
    ended = await world.ended(request.session_id)
    assert (ended.fact.code, ended.fact.steps) == ("max_steps", 4)
    turns = tools.of(request.session_id)
    places = [(turn.fact.step, turn.fact.turn, len(turn.fact.calls)) for turn in turns]
    assert places == [(0, 0, 2), (0, 1, 1), (2, 0, 2), (2, 1, 1)]
    assert counts_of(turns) == [(0, 0), (2, 2), (3, 3), (5, 5)]
    assert {turn.circumstance.calls_max for turn in turns} == {100}
    first, beside = tools.called[0], tools.called[1]
    assert first[0].envelope().causationid == f"{request.session_id}/started"
    assert beside[0].envelope().causationid == f"{request.session_id}/step:0"
    assert (beside[1].fact.inputs, first[1].circumstance.again) == (encode([]), False)
    use = first[1].circumstance.tools["add"]
    assert (use.spec, use.deadline_s) == (TOOL.ref, 1.5)
    verdict = await world.verdict(request)
    assert (verdict.first_divergence, verdict.complete) == (None, True)


async def test_a_session_that_waits_for_a_tool_does_not_hold_up_its_lane(world: World) -> None:
    world.record()
    world.answering = True
    tools = Tools(world)
    run = await world.worker(lane_wait_ms=60_000)
    waiting = await world.run_session(CODE, max_steps=4)
    await tools.until_called(waiting.session_id, 1)
    assert run.worker.roster.seats[waiting.session_id].waiting_on == "tool"
    other = await world.run_session(max_steps=20)
    assert (await world.ended(other.session_id)).fact.steps == 20
    assert not world.steps(waiting.session_id)
    # Nor does one whose step has its reward, and whose call beside the action has no answer.
    await tools.answer(tools.of(waiting.session_id)[0])
    await tools.until_called(waiting.session_id, 2)
    another = await world.run_session(max_steps=20)
    assert (await world.ended(another.session_id)).fact.steps == 20
    assert len(world.steps(waiting.session_id)) == 1


async def test_calls_that_nobody_answers_are_made_again_as_the_same_calls(world: World) -> None:
    world.record()
    tools = Tools(world)
    await world.worker(reply_wait_s=1.0)
    request = await world.run_session(CODE, max_steps=4)
    turns = await tools.until_called(request.session_id, 3)
    assert [turn.circumstance.again for turn in turns] == [False, True, True]
    assert turns[0].fact == turns[1].fact == turns[2].fact
    times = [message.time.timestamp() for message, _ in tools.called]
    # They have their deadline first. The server takes a call a moment after it is published.
    assert times[1] - times[0] > TOOL.deadline_s + 0.5


@pytest.mark.parametrize("answered_before_the_restart", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_session_whose_worker_died_goes_on_with_the_same_chain(
    world: World, calls: int, answered_before_the_restart: bool
) -> None:
    """Killed at a tool turn (1), and at a call beside an action (2)."""
    world.record()
    world.answering = True
    tools = Tools(world)
    first = await world.worker()
    request = await world.run_session(CODE, max_steps=4)
    for n in range(1, calls):
        turns = await tools.until_called(request.session_id, n)
        await tools.answer(turns[n - 1])
    turn = (await tools.until_called(request.session_id, calls))[calls - 1]
    await asyncio.sleep(0.2)
    await first.close()
    del world.runs["w1"]
    if answered_before_the_restart:
        await tools.answer(turn)
    # It does not wait until an answer is overdue: the call may never have been published.
    await world.worker("w2", reply_wait_s=60)
    await world.place(request, "w2", 2, previous_lane="w1-0")
    if not answered_before_the_restart:
        again = (await tools.until_called(request.session_id, calls + 1))[calls]
        assert again.fact == turn.fact
        assert (again.circumstance.again, again.circumstance.lane) == (True, "w2-0")
        await tools.answer(turn)  # to the lane that is gone
    tools.answering = True
    ended = await world.ended(request.session_id)
    assert (ended.fact.code, ended.fact.steps) == ("max_steps", 4)
    counts = {(0, 0): 0, (0, 1): 2, (2, 0): 3, (2, 1): 5}  # whoever publishes a turn
    for turn in tools.of(request.session_id):
        assert turn.circumstance.calls_before == counts[turn.fact.step, turn.fact.turn]
    assert (await world.verdict(request)).ok
    await world.worker()
    undisturbed = await world.run_session(CODE, max_steps=4)
    assert (await world.ended(undisturbed.session_id)).fact.chain == ended.fact.chain


async def test_calls_that_fit_no_message_end_their_session_alone(
    small_nats_url: str, log_url: str, tmp_path: Path
) -> None:
    async with world_on(small_nats_url, log_url, tmp_path) as world:
        world.record()
        world.answering = True
        await world.worker()
        large = AGENT.replace('{"n": self.asked}', '{"n": "x" * 30_000}')
        request = await world.run_session(code_of(large, tools=[TOOL]), max_steps=4)
        other = await world.run_session(max_steps=4)
        ended = await world.ended(request.session_id)
        assert (await world.ended(other.session_id)).fact.code == "max_steps"
        assert ended.fact.code == UNPUBLISHABLE
        verdict = await world.verdict(request)
        assert (verdict.first_divergence, verdict.complete) == (None, True)


async def test_a_result_from_the_object_store_is_the_result(world: World, tmp_path: Path) -> None:
    """Live, after a restart and in verification: the way that it took changes no chain."""
    world.record()
    world.answering = True
    tools = Tools(world)
    url = f"file://{tmp_path}/objects"
    store = ObjectStore(url)
    tools.store, tools.answering = store, True
    first = await world.worker(object_store_url=url)
    request = await world.run_session(CODE, max_steps=4)
    ended = await world.ended(request.session_id)
    assert (ended.fact.code, ended.fact.steps) == ("max_steps", 4)
    assert (await world.verdict(request, store.get)).ok
    without = (await world.verdict(request)).first_divergence
    assert without is not None
    assert "object store" in without.expected

    tools.answering = False
    again = await world.run_session(CODE, max_steps=4)
    turn = (await tools.until_called(again.session_id, 1))[0]
    await tools.answer(turn)
    await tools.until_called(again.session_id, 2)
    await first.close()
    del world.runs["w1"]
    await world.worker("w2", object_store_url=url)
    tools.answering = True
    await world.place(again, "w2", 2, previous_lane="w1-0")
    assert (await world.ended(again.session_id)).fact.chain == ended.fact.chain

    tools.store = None
    inline = request_of(CODE, max_steps=4)
    await world.place(inline, "w2")
    assert (await world.ended(inline.session_id)).fact.chain == ended.fact.chain


async def test_a_result_that_the_store_does_not_have_ends_its_session_with_that_reason(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "ABSENT_S_MAX", 0.3)
    world.record()
    world.answering = True
    tools = Tools(world)
    (tmp_path / "objects").mkdir()
    await world.worker(object_store_url=f"file://{tmp_path}/objects")
    tools.store = ObjectStore(f"file://{tmp_path}/another")
    tools.answering = True
    request = await world.run_session(CODE, max_steps=4)
    ended = await world.ended(request.session_id)
    assert (ended.fact.status, ended.fact.code) == ("failed", "blob_not_found")
    assert "the result of a tool" in ended.circumstance.message
    other = await world.run_session(max_steps=4)
    assert (await world.ended(other.session_id)).fact.code == "max_steps"


def test_a_stored_result_of_other_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="other bytes than its name says"):
        StoredResult(0, "0" * 64, b"h" * 16).given(b"x")


def test_a_turn_is_counted_once_however_often_it_is_asked_for() -> None:
    def turn(step: int, *names: str) -> Called:
        return Called(step, 0, b"", tuple(Call("", name, "{}") for name in names), b"", b"")

    turns = turn(0, "a", "b"), turn(1, "a"), turn(2, "b")
    counts = CallCounts()
    told = [counts.before(one) for one in turns]
    assert told == [{}, {"a": 1, "b": 1}, {"a": 2, "b": 1}]
    assert [counts.before(one) for one in turns] == told
    again = CallCounts(reversed(turns))  # of a session that comes back
    assert [again.before(one) for one in turns] == told
    assert again.before(turn(3, "a")) == {"a": 2, "b": 2}


async def test_an_answer_behind_one_that_is_fetched_does_not_overtake_it() -> None:
    """Of two answers to a call the first counts, so that a restart hears the same."""
    content, given = encode("first"), []
    blob = hashlib.sha256(content).hexdigest()

    class Slow(ObjectStore):
        def get(self, key: str) -> bytes:
            time.sleep(0.1)
            return content

    waiting = results.Results(
        Slow("file:///nowhere"), lambda _, one: given.append(one.content), lambda *_: None
    )
    running = asyncio.create_task(waiting.run())
    assert waiting.holds(b"a", StoredResult(0, blob, b"h" * 16)) is None
    second = result_input(0, "", encode("second"), b"h" * 16)
    assert waiting.holds(b"a", second) is None
    assert waiting.holds(b"b", second) is second
    async with asyncio.timeout(60):
        while len(given) < 2:  # noqa: ASYNC110 - a thread's work
            await asyncio.sleep(0.01)
    assert given == [content, encode("second")]
    assert waiting.holds(b"a", second) is second
    running.cancel()
