"""Rewards that ask outside services, on a real nats-server and real HTTP services."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.reward.conftest import (
    ENV_SPEC,
    Rig,
    facts,
    observation,
    session,
    spec_of,
    step_fact,
)
from tests.reward.http_service import Answer, Asked, HttpService, http_service

from dsec.reward.reexecution import read_recorded
from dsec.reward.score import load_scorer
from dsec_contracts import SYSTEM_SESSION, RewardDeferred, RewardScored, ServiceModeChanged
from dsec_contracts.reward import RewardNoticeFact

pytestmark = [pytest.mark.nats, pytest.mark.timeout(180)]

ASKS = spec_of(
    "@dsec.reward(services=['stock'])\n"
    "async def score(t, services):\n"
    "    left = await services['stock'].get('/left', params={'step': t.step})\n"
    "    return left.json()['left'] + t.env_reward\n"
)
TWICE = spec_of(
    "@dsec.reward(services=['stock'])\n"
    "async def score(t, services):\n"
    "    a, b = await services.gather(*[services['stock'].get('/left')] * 2)\n"
    "    c = await services['stock'].post('/left', json={'n': a.json()['left']})\n"
    "    return {'a': a.json()['left'], 'b': b.json()['left'], 'c': c.json()['left']}\n"
)


async def asked_for(service: HttpService, count: int) -> None:
    """Wait until it was asked so often."""
    async with asyncio.timeout(60):
        while len(service.asked) < count:  # noqa: ASYNC110 - another process asks
            await asyncio.sleep(0.02)


async def seven(asked: Asked) -> Answer:
    return Answer(body={"left": 7})


@pytest.fixture
async def stock() -> AsyncIterator[HttpService]:
    async with http_service() as service:
        service.behave = seven
        yield service


async def test_a_reward_that_asks_and_what_is_recorded_of_it(rig: Rig, stock: HttpService) -> None:
    rig.know(ASKS, TWICE)
    rig.declare("stock", stock.url, headers={"X-Key": "v ${KEY}"})
    rig.start({"DSEC_SECRET_KEY": "hush"})

    async def tells(asked: Asked) -> Answer:
        return Answer(body={"left": 7, "you": asked.headers["x-key"]})

    stock.behave = tells
    await rig.send([ASKS[0], ENV_SPEC[0], TWICE[0]], step=3, env_reward=float)
    found = await rig.scored(2)
    if sum(event.rows for event in found) < 3:  # what is answered at once travels together
        found = await rig.scored(3)
    by_row = facts(found)
    assert [by_row[session(n).bytes, 3] is not None for n in range(3)]
    values = {
        event.row.session_id[n * 16 : n * 16 + 16]: value
        for event in found
        for n, value in enumerate(np.frombuffer(event.row.value, "<f8"))
    }
    assert values == {session(0).bytes: 7.0, session(1).bytes: 1.0, session(2).bytes: 21.0}
    assert found[0].row.session_id == session(1).bytes, "who asks nobody waits for nobody"
    assert found[0].row.responses is None
    assert {asked.headers["x-key"] for asked in stock.asked} == {"v hush"}
    assert len({asked.headers["idempotency-key"] for asked in stock.asked}) == len(stock.asked) == 4
    for event in found[1:]:
        assert event.row.responses is not None
        for raw_id, responses in zip(
            [event.row.session_id[n : n + 16] for n in range(0, 16 * event.rows, 16)],
            event.row.responses.unpack(),
            strict=True,
        ):
            assert b"hush" not in responses
            spec = ASKS if raw_id == session(0).bytes else TWICE
            known = read_recorded(responses)
            assert json.loads(known[0].body) == {"left": 7, "you": "v ***"}
            n = 0 if spec is ASKS else 2
            fact = step_fact(3, env_reward=float(n), n=n)
            again = load_scorer(*spec).score(fact, observation(n), observation(n + 1), responses)
            assert again.value == values[raw_id]


async def test_a_slow_function_holds_up_nobody_who_needs_none(rig: Rig, tmp_path: Path) -> None:
    """Nor does the start of the process that functions run in."""
    goes_on = tmp_path / "goes-on"
    busy = spec_of(
        "import os\n"
        "@dsec.reward()\n"
        "def score(t, services):\n"
        f"    while not os.path.exists({str(goes_on)!r}):\n"
        "        pass\n"
        "    return 2.0\n"
    )
    rig.know(busy)
    rig.start()
    await rig.send([busy[0]], "busy", step=0)
    await rig.send([ENV_SPEC[0]], "quick", step=1)
    await rig.scored(1)
    goes_on.touch()
    found = await rig.scored(2)
    assert [np.frombuffer(event.row.value, "<f8")[0] for event in found] == [1.0, 2.0]


async def test_retries_after_429_and_what_retry_after_asks(rig: Rig, stock: HttpService) -> None:
    rig.know(ASKS)
    rig.declare("stock", stock.url, retry={"backoff_s_min": 0.01, "backoff_s_max": 0.05})
    rig.start()

    async def storm(asked: Asked) -> Answer:
        if len(stock.asked) <= 3:
            # All have asked: who comes after the first is told waits as long as the first does.
            await asked_for(stock, 3)
            return Answer(429, "wait", {"Retry-After": "1"})
        return Answer(body={"left": 7})

    stock.behave = storm
    await rig.send([ASKS[0]] * 3)
    await rig.scored(1)
    await rig.settled()
    assert sum(event.rows for event in await rig.scored(1)) >= 1
    first, later = stock.asked[:3], stock.asked[3:]
    assert len(later) == 3
    assert min(a.at for a in later) - max(a.at for a in first) >= 0.9
    keys = sorted(a.headers["idempotency-key"] for a in first)
    assert sorted(a.headers["idempotency-key"] for a in later) == keys


@pytest.mark.parametrize("status", [404, 500, 301])
async def test_what_is_not_retried_is_the_functions_to_judge(
    rig: Rig, stock: HttpService, status: int
) -> None:
    tolerant = spec_of(
        "@dsec.reward(services=['stock'])\n"
        "async def score(t, services):\n"
        "    return (await services['stock'].get('/')).status\n"
    )
    rig.know(tolerant)
    rig.declare("stock", stock.url)
    rig.start()

    async def refuses(asked: Asked) -> Answer:
        return Answer(status, "no", {"Location": "http://127.0.0.1:1/"})

    stock.behave = refuses
    await rig.send([tolerant[0]])
    (event,) = await rig.scored(1)
    assert np.frombuffer(event.row.value, "<f8")[0] == status
    assert len(stock.asked) == 1


@pytest.mark.parametrize(
    ("what", "code", "attempts"),
    [
        ("down", "service_unavailable", 0),
        ("never", "service_deadline", 3),
        ("503", "service_unavailable", 4),
    ],
)
async def test_a_reward_is_missing_only_when_all_is_tried_and_never_zero(
    rig: Rig, stock: HttpService, what: str, code: str, attempts: int
) -> None:
    rig.know(ASKS)
    retry = {"attempts_max": 4, "backoff_s_min": 0.01, "backoff_s_max": 0.05}
    rig.declare("stock", stock.url, deadline_s=3.0, attempt_s_max=0.8, retry=retry)

    async def behave(asked: Asked) -> Answer:
        return Answer(503) if what == "503" else Answer(never=True)

    stock.behave = behave
    if what == "down":
        await stock.stop()
    rig.start(ack_wait_s=2)
    began = time.monotonic()
    await rig.send([ASKS[0], ENV_SPEC[0]])
    missing = await rig.missing(1)
    await rig.settled()
    notice = missing[session(0)]
    assert (notice.fact.code, notice.fact.fatal, notice.fact.step) == (code, False, 0)
    assert "stock" in notice.circumstance.message
    (event,) = await rig.scored(1)
    assert event.row.session_id == session(1).bytes
    assert len(stock.asked) >= attempts
    if what == "never":
        assert time.monotonic() - began >= 2.4
    assert await rig.deliveries() == 1, "it was said that there is work in progress"


async def test_what_was_answered_before_a_reward_went_missing_is_kept(
    rig: Rig, stock: HttpService
) -> None:
    fails = spec_of(
        "@dsec.reward(services=['stock'])\n"
        "async def score(t, services):\n"
        "    left = (await services['stock'].get('/left')).json()['left']\n"
        "    return 1 / left if t.env_reward else (await services['stock'].get('/down')).status\n"
    )

    async def behave(asked: Asked) -> Answer:
        return Answer(503) if asked.path == "/down" else Answer(body={"left": 0})

    rig.know(fails)
    rig.declare("stock", stock.url, retry={"attempts_max": 1})
    stock.behave = behave
    rig.start()
    await rig.send([fails[0]] * 2, env_reward=float)
    notices = await rig.missing(2)
    assert notices[session(0)].fact.code == "service_unavailable"
    assert notices[session(1)].fact.code == "reward_raised"
    for notice in notices.values():
        (known,) = read_recorded(notice.circumstance.responses or b"")
        assert (known.path, json.loads(known.body)) == ("/left", {"left": 0})


async def test_a_process_that_wants_a_service_its_spec_does_not_name_is_refused(
    rig: Rig, stock: HttpService
) -> None:
    hostile = spec_of(
        "from dsec.reward.services import Request\n"
        "class Wants:\n"
        "    def __await__(self):\n"
        "        (found,) = yield [Request('stock', 'GET', '/left', (), None)]\n"
        "        return found\n"
        "@dsec.reward(services=['price'])\n"
        "async def score(t, services):\n"
        "    return (await Wants()).json()['left']\n"
    )
    rig.know(hostile)
    rig.declare("stock", stock.url)
    rig.start()
    await rig.send([hostile[0]], deferrable=True)
    notice = (await rig.missing(1))[session(0)]
    assert notice.fact.code == "service_not_declared"
    assert "stock" in notice.circumstance.message
    assert not stock.asked


async def test_an_answer_after_the_deadline_of_an_attempt(rig: Rig, stock: HttpService) -> None:
    async def late_once(asked: Asked) -> Answer:
        number = len(stock.asked)
        if number == 1:
            await asked_for(stock, 2)  # its time is over
        return Answer(body={"left": number})

    rig.know(ASKS)
    rig.declare("stock", stock.url, attempt_s_max=1.0)
    stock.behave = late_once
    rig.start()
    await rig.send([ASKS[0]])
    (event,) = await rig.scored(1)
    value = np.frombuffer(event.row.value, "<f8")[0]
    assert value >= 3.0, "that of an attempt after the first"


async def test_a_service_that_is_down_for_some_seconds_costs_nothing(
    rig: Rig, stock: HttpService
) -> None:
    rig.know(ASKS)
    rig.declare("stock", stock.url, retry={"attempts_max": 100, "backoff_s_max": 0.5})
    await stock.stop()
    rig.start(ack_wait_s=2)
    await rig.send([ASKS[0]] * 4)
    await asyncio.sleep(3)
    await stock.start()
    await rig.settled()
    events = await rig.scored(1)
    assert len(facts(events)) >= 1
    assert await rig.deliveries() == 1


async def test_a_service_that_was_declared_wrong_is_found_once_it_is_declared_right(
    rig: Rig, stock: HttpService
) -> None:
    """Its callers wait for it, so no tick comes that would ask how it is declared."""
    patient = {"deadline_s": 600, "retry": {"attempts_max": 100, "backoff_s_max": 0.5}}
    rig.know(ASKS)
    async with http_service() as wrong:

        async def unavailable(asked: Asked) -> Answer:
            return Answer(503)

        wrong.behave = unavailable
        rig.declare("stock", wrong.url, **patient)
        rig.start()
        await rig.send([ASKS[0]] * 4)
        await asked_for(wrong, 4)
        rig.declare("stock", stock.url, version=2, **patient)
        await rig.settled()
    assert len(facts(await rig.scored(1))) >= 1
    assert await rig.deliveries() == 1


async def test_a_budget_that_was_too_small_is_raised_for_those_who_wait(
    rig: Rig, stock: HttpService
) -> None:
    rig.know(ASKS)
    rig.declare("stock", stock.url, qps_budget=0.1)
    rig.start()
    await rig.send([ASKS[0]] * 16)
    await asked_for(stock, 1)
    rig.declare("stock", stock.url, version=2)
    await rig.settled()
    assert len(stock.asked) == 16


async def test_a_slow_service_holds_up_nobody_who_does_not_ask_it(
    rig: Rig, stock: HttpService
) -> None:
    answers = asyncio.Event()

    async def slow(asked: Asked) -> Answer:
        await answers.wait()
        return Answer(body={"left": 7})

    rig.know(ASKS)
    rig.declare("stock", stock.url, concurrency_max=64, deadline_s=60, attempt_s_max=50)
    stock.behave = slow
    rig.start(ticks_waiting_max=4)
    for n in range(6):  # more than may wait
        await rig.send([ASKS[0]], f"slow{n}", step=n)
    await asked_for(stock, 4)
    for n in range(20):
        await rig.send([ENV_SPEC[0]], f"quick{n}", step=100 + n)
    quick = await rig.scored(20)
    answers.set()
    assert all(event.row.responses is None for event in quick)
    await rig.settled()
    assert len(facts(await rig.scored(26))) == 26


async def test_a_lane_that_asks_again_is_answered_once(rig: Rig, stock: HttpService) -> None:
    answers = asyncio.Event()

    async def slow(asked: Asked) -> Answer:
        await answers.wait()
        return Answer(body={"left": 7})

    rig.know(ASKS)
    rig.declare("stock", stock.url)
    stock.behave = slow
    rig.start()
    await rig.send([ASKS[0]] * 2, "a")
    await asked_for(stock, 2)
    await rig.send([ASKS[0]] * 2, "again")
    async with asyncio.timeout(60):
        while await rig.deliveries() < 2:  # noqa: ASYNC110 - the server's, not ours
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)  # what it would ask
    answers.set()
    await rig.settled()
    assert len(facts(await rig.scored(1))) >= 1
    assert len(stock.asked) == 2


async def test_a_service_that_nobody_declared(rig: Rig) -> None:
    rig.know(ASKS)
    rig.start(absent_s_max=1)
    await rig.send([ASKS[0], ENV_SPEC[0]])
    notice = (await rig.missing(1))[session(0)]
    assert (notice.fact.code, notice.fact.fatal) == ("service_not_declared", True)
    assert "dsec services declare" in notice.circumstance.message


async def test_a_secret_that_the_service_does_not_have(rig: Rig, stock: HttpService) -> None:
    rig.know(ASKS)
    rig.declare("stock", stock.url, headers={"X-Key": "${NO_SUCH}"})
    rig.start()
    await rig.send([ASKS[0]])
    notice = (await rig.missing(1))[session(0)]
    assert (notice.fact.code, notice.fact.fatal) == ("secret_absent", False)
    assert "DSEC_SECRET_NO_SUCH" in notice.circumstance.message
    assert stock.asked == []


async def test_what_a_killed_replica_was_at_is_anothers_within_seconds(
    rig: Rig, stock: HttpService
) -> None:
    async def first_never(asked: Asked) -> Answer:
        return Answer(never=True) if len(stock.asked) <= 2 else Answer(body={"left": 7})

    rig.know(ASKS)
    rig.declare("stock", stock.url, deadline_s=60, attempt_s_max=50)
    stock.behave = first_never
    first = rig.start(ack_wait_s=1)
    await rig.send([ASKS[0]] * 2)
    await asked_for(stock, 2)
    keys = {a.headers["idempotency-key"] for a in stock.asked}
    rig.start(ack_wait_s=1)
    await rig.receiving(2)
    first.kill()
    began = time.monotonic()
    await rig.settled()
    # Most of it the start of a scoring process, and far less than the call may take.
    assert time.monotonic() - began < 40
    assert {a.headers["idempotency-key"] for a in stock.asked} == keys
    assert len(stock.asked) == 4, rig.logs()
    assert sum(event.rows for event in await rig.scored(1)) >= 1


@pytest.mark.long
async def test_rewards_are_deferred_while_a_service_is_slow(rig: Rig, stock: HttpService) -> None:
    delay_s = 0.6

    async def slow(asked: Asked) -> Answer:
        await asyncio.sleep(delay_s)
        if asked.path == "/batch":
            wanted = json.loads(asked.body)["requests"]
            good = {"status": 200, "json": {"left": 7}}
            # One of the first batch is refused, and asked for again: alone.
            again = len(wanted) == 8 and len(stock.asked) <= 9
            return Answer(
                body={
                    "responses": [good] * (len(wanted) - 1)
                    + [{"status": 503, "json": None} if again else good]
                }
            )
        return Answer(body={"left": 7})

    rig.know(ASKS)
    rig.declare("stock", stock.url, batch={"path": "/batch", "size_max": 8, "wait_ms": 50})
    stock.behave = slow
    rig.start()
    await rig.send([ASKS[0]] * 8, "first", deferrable=True)
    await rig.settled()
    await asyncio.sleep(1.2)  # the mode is shared twice a second
    singles = len(stock.asked)
    assert singles == 8
    await rig.send([ASKS[0]] * 8, "deferred", step=1, deferrable=True)
    notices: list[RewardNoticeFact] = []
    deferred = 0
    while len(notices) < 8:
        # Of the first ones too, where a call outlasts the first report that it is slow.
        told = [m.event() for m in await rig.messages("reward.deferred", deferred + 1)]
        deferred = len(told)
        notices = [e.fact for e in told if isinstance(e, RewardDeferred) and e.fact.step == 1]
    assert {(fact.code, fact.fatal) for fact in notices} == {("service_slow", False)}
    assert {fact.cause for fact in notices} == {bytes([n]) * 16 for n in range(8)}
    await rig.settled()
    assert [a.path for a in stock.asked[singles:]] == ["/batch", "/batch"]
    assert [len(json.loads(a.body)["requests"]) for a in stock.asked[singles:]] == [8, 1]
    rewards = await rig.messages("reward.scored", 2)
    late = [m for m in rewards if isinstance(e := m.event(), RewardScored) and e.row.step[0] == 1]
    assert late
    last_notice = max(m.sequence for m in await rig.messages("reward.deferred", deferred))
    assert all(m.sequence > last_notice for m in late)

    await rig.send([ASKS[0]], "cannot", step=2)  # a session that does not take it waits
    await rig.settled()
    assert len(await rig.messages("reward.deferred", deferred)) == deferred

    delay_s = 0.0  # and back
    for n in range(14):
        await rig.send([ASKS[0]] * 8, f"calm{n}", step=10 + n, deferrable=True)
        await asyncio.sleep(1)
    await rig.logged("asked synchronous rewards now")


async def test_who_was_asked_for_before_a_service_hung_goes_on_without(
    rig: Rig, stock: HttpService
) -> None:
    async def never(asked: Asked) -> Answer:
        return Answer(never=True)

    rig.know(ASKS)
    rig.declare("stock", stock.url, deadline_s=300, attempt_s_max=250)
    stock.behave = never
    for _ in range(2):
        rig.start()
    await rig.receiving(2)
    for n in range(2):
        await rig.send([ASKS[0]] * 6, f"tick{n}", step=n, deferrable=True)
    notices = [m.event() for m in await rig.messages("reward.deferred", 12)]
    assert {e.fact.step for e in notices if isinstance(e, RewardDeferred)} == {0, 1}
    await asked_for(stock, 12)
    await asyncio.sleep(1)
    assert len(stock.asked) == 12, "nothing was asked again"
    (message,) = await rig.messages("service.mode_changed", 1, "stock")  # one replica says so
    switched = message.event()
    assert isinstance(switched, ServiceModeChanged)
    assert (switched.fact.name, switched.fact.mode) == ("stock", "deferred")
    assert (switched.circumstance.p95_ms or 0) > 200 == switched.circumstance.latency_switch_ms
    assert message.envelope().causationid == f"{SYSTEM_SESSION}/service:stock.1"


async def test_a_service_that_is_nowhere_is_a_reason_and_no_wait(rig: Rig) -> None:
    rig.know(ASKS)
    rig.declare("stock", "http://[::1")
    rig.start()
    await rig.send([ASKS[0]])
    notice = (await rig.missing(1))[session(0)]
    assert (notice.fact.code, notice.fact.fatal) == ("service_invalid", False)


@pytest.mark.long
async def test_one_request_that_a_batch_cannot_take_is_not_the_fault_of_the_others(
    rig: Rig, stock: HttpService
) -> None:
    async def slow(asked: Asked) -> Answer:
        await asyncio.sleep(0.6)
        return Answer(status=413) if asked.path == "/batch" else Answer(body={"left": 7})

    rig.know(ASKS)
    rig.declare("stock", stock.url, batch={"path": "/batch", "size_max": 8, "wait_ms": 50})
    stock.behave = slow
    rig.start()
    await rig.send([ASKS[0]] * 8, "first", deferrable=True)
    await rig.settled()
    await asyncio.sleep(1.2)  # the mode is shared twice a second
    await rig.send([ASKS[0]] * 3, "deferred", step=1, deferrable=True)
    await rig.settled()
    assert [a.path for a in stock.asked[8:]] == ["/batch", "/left", "/left", "/left"]
    found = facts(await rig.scored(1))
    assert all(found.get((session(n).bytes, 1)) is not None for n in range(3)), rig.logs()


async def test_what_one_call_was_handed_does_not_go_with_the_next(
    rig: Rig, stock: HttpService
) -> None:
    async def sets(asked: Asked) -> Answer:
        return Answer(body={"left": 7}, headers={"Set-Cookie": "session=1; Path=/"})

    stock.behave = sets
    rig.know(ASKS)
    rig.declare("stock", stock.url)
    rig.start()
    for step in range(2):
        await rig.send([ASKS[0]], f"t{step}", step=step)
        await rig.settled()
    assert [a.headers.get("cookie") for a in stock.asked] == [None, None]


async def test_a_secret_stays_hidden_when_the_service_is_declared_anew_on_the_way(
    rig: Rig, stock: HttpService
) -> None:
    async def tells(asked: Asked) -> Answer:
        if len(stock.asked) == 1:
            rig.declare("stock", stock.url, version=2)
            await asked_for(stock, 2)
            await asyncio.sleep(0.3)
        return Answer(body={"left": 7, "you": asked.headers.get("x-key")})

    stock.behave = tells
    rig.know(ASKS)
    rig.declare("stock", stock.url, headers={"X-Key": "v ${KEY}"}, attempt_s_max=9)
    rig.start({"DSEC_SECRET_KEY": "hush-hush"})
    await rig.send([ASKS[0]], "one")
    await asked_for(stock, 1)
    await asyncio.sleep(2.5)  # a declaration that was changed holds after this long
    await rig.send([ASKS[0]], "two", step=1)
    await rig.settled()
    assert [a.headers.get("x-key") for a in stock.asked] == ["v hush-hush", None]
    recorded = b"".join(
        answer for event in await rig.scored(2) for answer in event.row.responses.unpack()
    )
    assert b"***" in recorded
    assert b"hush-hush" not in recorded
