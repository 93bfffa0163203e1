"""The service on a real nats-server: what goes in and what comes out, whatever functions do."""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
import time

import numpy as np
import psutil
import pytest
from tests.reward.conftest import ENV_SPEC, Rig, facts, session, spec_of, tick

from dsec.platform.bus import Message
from dsec.reward.isolation import FAULTS_MAX
from dsec_contracts import RewardScored, encode

pytestmark = [pytest.mark.nats, pytest.mark.timeout(180)]

ADDS = spec_of("@dsec.reward()\ndef score(t, services):\n    return t.env_reward + 1\n")
RAISES = spec_of("def score(t, services):\n    raise ValueError('größe')\n")
SLOW = spec_of("def score(t, s):\n    for _ in range(500_000): pass\n    return 1\n")
EXITS = spec_of("import os\ndef score(t, services):\n    os._exit(3)\n")
BLOCKS = spec_of("def score(t, services):\n    while True: pass\n")
BLOCKS_TOO = spec_of("def score(t, services):\n    while True: 1\n")


async def test_128_rows_in_and_their_rewards_out(service: Rig) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await service.send([ENV_SPEC[0]] * 128, "7.0", step=3, env_reward=float, traceparent=trace)
    (message,) = await service.messages("reward.scored", 1)
    envelope, event = message.envelope(), message.event()
    assert (envelope.id, envelope.source) == (f"reward.{service.lane}.7.0", "dsec/reward")
    assert envelope.traceparent == trace
    assert isinstance(event, RewardScored)
    assert (event.rows, event.circumstance.lane) == (128, service.lane)
    assert event.row.value == np.arange(128, dtype="<f8").tobytes()
    assert event.row.step == struct.pack("<i", 3) * 128
    for n, fact in enumerate(event.row.fact.unpack()):
        cause = bytes([n]) * 16
        assert fact == encode([3, 1, float(n), {"env": [float(n), 1.0]}, cause])
        assert event.row.session_id[16 * n : 16 * n + 16] == session(n).bytes
        assert event.row.cause[16 * n : 16 * n + 16] == cause


async def test_rewards_that_fill_more_than_a_message(service: Rig) -> None:
    wide = spec_of(
        "@dsec.reward()\ndef score(t, s):\n    return {f'{n:0128}': 1 for n in range(64)}\n"
    )
    service.know(wide)
    await service.send([wide[0]] * 128)
    ids = [m.envelope().id for m in await service.messages("reward.scored", 2)]
    assert ids[0] == f"reward.{service.lane}.a"
    # The next is named by its rows: a retry may cut elsewhere.
    assert re.fullmatch(rf"reward\.{service.lane}\.a\.\d+-128", ids[1])
    assert len(facts(await service.scored(2))) == 128


async def test_a_function_that_raises_costs_its_own_session_only(service: Rig) -> None:
    service.know(ADDS, RAISES)
    specs = [ADDS[0]] * 32
    specs[5], specs[7], specs[9] = RAISES[0], ENV_SPEC[0], ""
    await service.send(specs, step=2)
    found = await service.missing(2)
    assert {i: e.fact.code for i, e in found.items()} == {
        session(5): "reward_raised",
        session(9): "reward_load_failed",
    }
    notice = found[session(5)]
    assert (notice.fact.step, notice.fact.fatal, notice.fact.cause) == (2, True, bytes([5]) * 16)
    assert notice.circumstance.lane == service.lane
    assert "größe" in notice.circumstance.message
    (event,) = await service.scored(1)
    others = [n for n in range(32) if n not in (5, 9)]
    assert list(np.frombuffer(event.row.value, "<f8")) == [1.0 if n == 7 else 2.0 for n in others]
    assert event.row.session_id == b"".join(session(n).bytes for n in others)
    assert event.row.cause == b"".join(bytes([n]) * 16 for n in others)


async def test_functions_that_end_or_block_their_process(service: Rig) -> None:
    service.know(ADDS, EXITS, BLOCKS)
    await service.send([ADDS[0], EXITS[0], ADDS[0], BLOCKS[0], ADDS[0]])
    found = await service.missing(2)
    assert {i: e.fact.code for i, e in found.items()} == {
        session(1): "reward_crashed",
        session(3): "reward_deadline",
    }
    assert [e.rows for e in await service.scored(1)] == [3]
    await service.send([ADDS[0]], "b", step=1)
    await service.scored(2)


async def test_a_function_may_print_and_learns_no_addresses(service: Rig) -> None:
    curious = spec_of(
        "import os, sys\ndef score(t, services):\n    print('x' * 100_000, sys.stdin.read())\n"
        "    return sum(name.startswith('DSEC_') for name in os.environ)\n"
    )
    service.know(curious)
    await service.send([curious[0]] * 2)
    (event,) = await service.scored(1)
    assert event.row.value == struct.pack("<2d", 0.0, 0.0)


async def test_of_many_sessions_of_one_blocking_function_only_those_that_were_tried_fail(
    service: Rig,
) -> None:
    service.know(BLOCKS_TOO, ADDS)
    start = time.monotonic()
    await service.send([BLOCKS_TOO[0]] * 100 + [ADDS[0]])
    assert [e.rows for e in await service.scored(1)] == [1]  # whoever stands beside them
    found = await service.missing(FAULTS_MAX)
    assert set(found) == {session(n) for n in range(FAULTS_MAX)}
    assert {e.fact.code for e in found.values()} == {"reward_deadline"}
    assert time.monotonic() - start < 60  # and not a hundred deadlines
    await service.send([BLOCKS_TOO[0]] * 3, "b", step=1)  # of other sessions, while the spec rests
    await service.send([ADDS[0]], "c", step=2)
    await service.scored(2)
    assert len(await service.messages("reward.missing", FAULTS_MAX)) == FAULTS_MAX


async def test_a_tick_that_is_sent_again_gives_the_same_facts(service: Rig) -> None:
    service.know(ADDS, RAISES)
    for name in ("a", "b"):  # a lane that heard nothing asks again under another id
        await service.send([ADDS[0], RAISES[0], ENV_SPEC[0]], name)
    assert len(facts(await service.scored(2))) == 2
    notices = await service.messages("reward.missing", 2)
    assert notices[0].event() == notices[1].event()


async def test_poison_among_a_hundred(service: Rig) -> None:
    for n in range(100):
        if n in (10, 50):
            headers = {
                "ce-id": f"p{n}",
                "ce-type": "session.stepped.v1",
                "ce-source": "x",
                "ce-time": "2026-01-01T00:00:00+00:00",
            }
            body = b"{nonsense" if n == 10 else tick([ENV_SPEC[0]], lane="no lane").body()
            await service.bus.publish_raw(f"dsec.session.stepped.{service.lane}", body, headers)
        await service.send([ENV_SPEC[0]] * 4, f"m{n}", step=n)
    assert len(facts(await service.scored(100))) == 400
    await service.settled()
    dead = await service.dead()
    assert len(dead) == 2
    assert "JSON" in dead[0].headers["dead-error"]
    assert "lane" in dead[1].headers["dead-error"]


async def test_a_spec_that_is_late_is_waited_for(service: Rig) -> None:
    late = spec_of("def score(t, services):\n    return 7\n")
    await service.send([late[0]])
    await service.logged("again in 0.4 s: SpecMissing")  # the second delivery
    service.know(late)
    assert [e.rows for e in await service.scored(1)] == [1]


async def test_a_spec_that_never_comes_ends_the_sessions_that_name_it(service: Rig) -> None:
    service.know(ADDS)
    never = spec_of("def score(t, services):\n    return 8\n")
    await service.send([never[0], ADDS[0]])
    (notice,) = (await service.missing(1)).values()
    assert (notice.fact.session_id, notice.fact.code) == (session(0), "spec_not_found")
    assert notice.fact.fatal
    assert [e.rows for e in await service.scored(1)] == [1]


async def test_long_work_is_not_given_to_another(service: Rig) -> None:
    service.know(SLOW)
    await service.settled()
    before = await service.deliveries()
    await service.send([SLOW[0]] * 200)  # several times as long as the server's patience
    while await service.deliveries() == before:  # noqa: ASYNC110 - the server's, not ours
        await asyncio.sleep(0.02)
    another = await service.bus.consumer("reward", ["dsec.session.stepped.*"], ack_wait_s=1)
    scored = asyncio.create_task(service.scored(1))
    taken: list[Message] = []
    while not scored.done():
        taken += await another.fetch(1, 0.2)
    await scored
    await another.close()
    assert not taken


async def test_no_scoring_process_is_left_over(service: Rig) -> None:
    """Last, after all that was killed above."""
    service.know(ADDS)
    await service.send([ADDS[0]])
    await service.scored(1)
    async with asyncio.timeout(60):
        while len(_scoring()) != 1:  # noqa: ASYNC110 - what was killed takes a moment to be gone
            await asyncio.sleep(0.05)


def _scoring() -> list[psutil.Process]:
    """The scoring processes that these tests have started, and that run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "dsec.reward.scoring_process" in process.cmdline():
                found.append(process)
    return found
