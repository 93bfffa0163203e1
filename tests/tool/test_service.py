"""The service as it runs: whom it answers, and what it does with a call that was had before."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from uuid import UUID

import pytest
from tests.tool.conftest import SESSION, Rig, spec_of

from dsec.platform.bus import Message
from dsec.platform.objects import ObjectStore
from dsec.session.stored_results import INLINE_BYTES_MAX
from dsec_contracts import (
    SessionEnded,
    ToolBegun,
    ToolFailed,
    ToolReturned,
    decode,
    encode,
    subjects,
)
from dsec_contracts.session import EndedFact
from dsec_contracts.tool import ToolBegunFact, ToolFailedFact, ToolReturnedFact

pytestmark = [pytest.mark.nats, pytest.mark.postgres]

SUM = spec_of("def tool(x=1): return {'sum': x + 1}", idempotent=True)
SLOW = "time.sleep(1.5)"


async def test_calls_of_a_turn_are_answered_one_by_one(rig: Rig) -> None:
    bad = spec_of("def tool(**_): raise ValueError('why')")
    await rig.know(SUM, bad)
    rig.start()
    await rig.call(SUM[0], bad[0], step=3, arguments='{"x": 4}')
    assert await rig.answered(2) == [{"sum": 5}, "tool_raised"]
    await rig.settled()
    for message, event in rig.answers:
        envelope = message.envelope()
        assert message.subject.rpartition(".")[2] == "lane"
        assert envelope.causationid == f"{SESSION}/tool_call:3.0"
        assert (event.fact.step, event.fact.turn_hash) == (3, bytes([3]) * 16)
        assert event.circumstance.replica == "r0"
        assert event.circumstance.seconds is not None


async def test_a_deadline_is_kept_and_says_whether_another_call_is_safe(rig: Rig) -> None:
    stuck = [spec_of("def tool():\n    while 1: pass", idempotent=one) for one in (True, False)]
    await rig.know(SUM, *stuck)
    rig.start()
    await rig.call(SUM[0], step=1)  # to wait for the replica is no part of the deadline
    await rig.answered()
    rig.answers.clear()
    began = time.monotonic()
    await rig.call(*(spec for spec, _ in stuck), deadline_s=1.0)
    assert await rig.answered(2) == ["deadline"] * 2
    assert time.monotonic() - began < 15
    told = {e.fact.index: e.fact.retryable for _, e in rig.answers if isinstance(e, ToolFailed)}
    assert told == {0: True, 1: False}


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_replica_that_is_killed_in_the_midst_of_a_call(rig: Rig, idempotent: bool) -> None:
    tool = rig.effect(SLOW, idempotent=idempotent)
    await rig.know(tool)
    first = rig.start()
    await rig.call(tool[0], deadline_s=3.0)
    await rig.until(rig.effects)
    first.kill()
    rig.start()
    outcome = await rig.answered()
    await rig.settled()
    if idempotent:
        assert outcome == ["done"]
        assert rig.effects() == [f"{SESSION}/call_0_0_0"] * 2  # the same key
    else:
        assert outcome == ["outcome_unknown"]
        assert rig.effects() == [f"{SESSION}/call_0_0_0"]


async def test_of_two_replicas_one_is_killed_between_an_effect_and_its_result(rig: Rig) -> None:
    made_by = rig.folder / "made_by"
    keeper = (
        "open(f'/proc/{os.getppid()}/stat').read()"  # the replica's child, and the tool's parent
    )
    replica = f"{keeper}.rpartition(')')[2].split()[1]"
    once = rig.effect(f"open({str(made_by)!r}, 'w').write({replica} + '.'); {SLOW}")
    await rig.know(SUM, once)
    replicas = {rig.start().pid: f"r{n}" for n in range(2)}
    seen: set[str | None] = set()
    while seen != set(replicas.values()):  # until both are at work
        await rig.call(SUM[0], step=(count := len(rig.answers)))
        await rig.answered(count + 1)
        seen = {event.circumstance.replica for _, event in rig.answers}
    rig.answers.clear()
    await rig.call(once[0], step=255, deadline_s=3.0)
    await rig.until(lambda: made_by.exists() and made_by.read_text().endswith("."))
    victim = int(made_by.read_text()[:-1])
    os.kill(victim, signal.SIGKILL)
    assert await rig.answered() == ["outcome_unknown"]
    await rig.settled()
    [(_, event)] = rig.answers
    assert {event.circumstance.replica, replicas[victim]} == {"r0", "r1"}
    assert rig.effects() == [f"{SESSION}/call_255_0_0"]


async def test_a_call_that_only_waited_in_a_replica_that_died_is_made(rig: Rig) -> None:
    """That it was delivered before does not mean that anybody began it."""
    tool = rig.effect()
    await rig.know(tool)
    consumer = await rig.bus.consumer("tool", ["dsec.tool.called.*"], ack_wait_s=1)
    await rig.call(tool[0])
    assert len(await consumer.fetch(1, 5)) == 1
    await consumer.close()
    rig.start()
    assert await rig.answered() == ["done"]
    assert len(rig.effects()) == 1


async def test_a_call_that_is_answered_is_not_made_again(rig: Rig) -> None:
    tool = rig.effect(idempotent=True)
    raising = rig.effect("raise ValueError('why')")
    await rig.know(tool, raising)
    rig.start()
    await rig.call(tool[0], raising[0])
    await rig.answered(2)
    await rig.call(tool[0], raising[0], again=True, lane="another")
    assert await rig.answered(4) == ["done", "done", "tool_raised", "tool_raised"]
    assert len(rig.effects()) == 2
    lanes = {message.subject.rpartition(".")[2] for message, _ in rig.answers}
    assert lanes == {"lane", "another"}
    for index in (0, 1):
        one, other = (event.fact for _, event in rig.answers if event.fact.index == index)
        assert one == other


async def test_a_call_that_another_replica_has_begun_is_left_to_it(rig: Rig) -> None:
    tool = rig.effect()
    await rig.know(tool)
    begun = ToolBegun(fact=ToolBegunFact(session_id=SESSION, step=0, turn=0, index=0))
    await rig.publish(begun, f"{SESSION}-call_0_0_0", session_id=SESSION)
    began = time.monotonic()
    rig.start()
    await rig.call(tool[0], deadline_s=4.0)
    assert await rig.answered() == ["outcome_unknown"]
    assert time.monotonic() - began > 4.0  # it had its deadline
    assert rig.effects() == []


async def test_trouble_of_one_call_stops_no_other(rig: Rig) -> None:
    tool = rig.effect(SLOW)
    await rig.know(tool)
    rig.start(retry_s_min=0.1)
    await rig.call("f" * 64, tool[0])
    assert await rig.answered(2) == ["spec_not_found", "done"]
    assert len(rig.effects()) == 1
    assert isinstance(rig.answers[0][1], ToolReturned)  # it did not wait for the other


async def test_a_repetition_of_a_call_at_work_is_not_made(rig: Rig) -> None:
    tool = rig.effect(SLOW, idempotent=True)
    await rig.know(tool)
    rig.start()
    await rig.call(tool[0])
    await rig.until(rig.effects)
    await rig.call(tool[0], again=True)
    assert await rig.answered() == ["done"]
    await rig.settled()
    assert len(rig.effects()) == 1


async def _end(rig: Rig, session_id: UUID) -> None:
    fact = EndedFact(
        session_id=session_id,
        status="cancelled",
        code="cancelled",
        steps=0,
        episodes=0,
        inputs=encode([]),
        chain=bytes(32),
    )
    await rig.publish(SessionEnded(fact=fact), session_id, session_id=session_id)


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_call_of_a_session_that_has_ended_is_stopped_and_its_place_is_free(
    rig: Rig, idempotent: bool
) -> None:
    tool = rig.effect("time.sleep(60)", idempotent=idempotent, quota={"concurrency": 1})
    quick = spec_of("def tool(): return 'quick'", idempotent=True)
    await rig.know(tool, quick)
    rig.start(calls_in_flight_max=1)
    await rig.call(tool[0], deadline_s=120.0)
    await rig.until(rig.effects)
    await rig.call(tool[0], step=1, deadline_s=120.0)  # which waits for the place of the first
    await asyncio.sleep(0.5)
    await _end(rig, SESSION)
    other = UUID("019cade2-11c0-7001-9f3a-5c7e9b2d5792")
    await rig.call(quick[0], step=2, session_id=other)
    await rig.until(lambda: len(rig.answers) == 3)  # long before any deadline
    facts = {event.fact.step: event.fact for _, event in rig.answers}
    assert isinstance(facts[2], ToolReturnedFact)
    for step, told in ((0, "in its midst"), (1, "it was not made")):
        fact = facts[step]
        assert isinstance(fact, ToolFailedFact)
        assert (fact.code, fact.retryable) == ("session_ended", False)
        assert told in fact.message
    await rig.call(tool[0], step=3)  # of a turn that comes late
    await rig.until(lambda: len(rig.answers) == 4)
    late = rig.answers[3][1].fact
    assert isinstance(late, ToolFailedFact)
    assert late.code == "session_ended"
    await rig.settled()
    assert len(rig.effects()) == 1


async def test_turns_run_side_by_side(rig: Rig) -> None:
    mark = str(rig.folder / "runs")
    tool = spec_of(
        "import os, time\n"
        "def tool(me, other):\n"
        f"    open({mark!r} + me, 'w').close()\n"
        f"    while not os.path.exists({mark!r} + other):\n"
        "        time.sleep(0.01)\n"
        "    return 'met'\n"
    )
    await rig.know(tool)
    rig.start()
    for step, arguments in enumerate(('{"me": "0", "other": "1"}', '{"me": "1", "other": "0"}')):
        await rig.call(tool[0], step=step, arguments=arguments)
    assert await rig.answered(2) == ["met", "met"]


async def test_a_stop_lets_calls_end_and_hands_the_rest_back(rig: Rig) -> None:
    tool = rig.effect(SLOW)
    await rig.know(tool)
    first = rig.start()
    await rig.call(tool[0])
    await rig.until(rig.effects)
    first.terminate()
    assert await rig.answered() == ["done"]
    assert await asyncio.to_thread(first.wait, 60) == 0
    await rig.settled()
    assert len(rig.effects()) == 1


async def test_what_is_no_call_is_put_aside(rig: Rig) -> None:
    await rig.know(SUM)
    rig.start()
    await rig.bus.publish_raw(f"dsec.tool.called.{SESSION}", b"{}", {"ce-id": "x"})
    await rig.call(SUM[0], lane="no lane")
    await rig.call(SUM[0], step=1)
    assert await rig.answered() == [{"sum": 2}]
    consumer = await rig.bus.consumer("test-dead", [subjects.dead_letter("tool")], ack="none")
    dead: list[Message] = []
    while len(dead) < 2:
        dead += await consumer.fetch(10, 1)
    assert len(dead) == 2


async def test_a_large_result_goes_through_the_object_store(rig: Rig) -> None:
    large = spec_of(f"def tool(): return 'x' * {INLINE_BYTES_MAX}", idempotent=True)
    beyond = spec_of("def tool(): return 'x' * 90_000", output_bytes_max=80_000)
    await rig.know(large, beyond)
    url = f"file://{rig.folder}/objects"
    rig.start(object_store_url=url)
    await rig.call(large[0], beyond[0], step=2)
    await rig.until(lambda: len(rig.answers) == 2)
    returned, failed = sorted((e for _, e in rig.answers), key=lambda e: e.fact.index)
    assert isinstance(returned, ToolReturned)
    assert returned.fact.content == b""
    assert returned.fact.blob is not None
    assert decode(ObjectStore(url).get(returned.fact.blob)) == "x" * INLINE_BYTES_MAX
    assert isinstance(failed, ToolFailed)
    assert failed.fact.code == "output_too_large"
    await rig.call(large[0], beyond[0], step=2, again=True)
    await rig.until(lambda: len(rig.answers) == 4)
    again = [e.fact for _, e in rig.answers[2:] if e.fact.index == 0]
    assert again == [returned.fact]


async def test_without_an_object_store_a_message_is_the_bound(rig: Rig) -> None:
    fits = spec_of("def tool(): return 'x' * 300_000")
    beyond = spec_of("def tool(): return 'x' * 1_000_000")
    await rig.know(fits, beyond)
    rig.start(object_store_url="")
    await rig.call(fits[0], beyond[0])
    assert await rig.answered(2) == ["x" * 300_000, "output_too_large"]
