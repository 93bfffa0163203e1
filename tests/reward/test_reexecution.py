"""A function that asks services: run again with what is known, until nothing is wanted."""

from __future__ import annotations

import json

import pytest
from tests.reward.conftest import observation, spec_of, step_fact

from dsec.reward.components import RewardError
from dsec.reward.frames import Needs, Task, read_reply, read_request, reply, request
from dsec.reward.reexecution import Asks, answered, read_recorded, recorded
from dsec.reward.score import Score, load_scorer
from dsec.reward.services import Request, Response, Services, malformed

BEFORE, AFTER = observation(0), observation(1)
DECLARED = "@dsec.reward(services=['stock', 'price'])\n"


def answer(asked: Request) -> Response:
    """A service that says what it was asked, and a number that depends on nothing else."""
    body = json.dumps({"n": len(asked.path), "params": dict(asked.params)}).encode()
    return Response(200, {"content-type": "application/json"}, body)


def play(body: str, rounds: list[list[Request]] | None = None) -> tuple[Score, bytes]:
    """Score a step, answering whatever is asked. Returns what was recorded too."""
    scorer = load_scorer(*spec_of(body))
    known = b""
    for _ in range(100):
        try:
            return scorer.score(step_fact(), BEFORE, AFTER, known), known
        except Asks as asks:
            if rounds is not None:
                rounds.append(list(asks.requests))
            before = read_recorded(known)
            known = recorded(answered(asks.requests, list(map(answer, asks.requests)), before))
    raise AssertionError("it never has enough")


def refusal(body: str) -> RewardError:
    with pytest.raises(RewardError) as caught:
        play(body)
    return caught.value


def test_one_call_after_the_other_and_the_same_reward_from_the_record() -> None:
    body = DECLARED + (
        "async def score(t, services):\n"
        "    a = await services['stock'].get('/a', params={'sku': 7, 'all': True})\n"
        "    b = await services['price'].post('/bc', json={'n': a.json()['n']})\n"
        "    c = await services['stock'].get('/a', params={'sku': 7, 'all': True})\n"
        "    return a.json()['n'] + 10 * b.json()['n'] + 100 * c.status\n"
    )
    rounds: list[list[Request]] = []
    score, known = play(body, rounds)
    assert score.value == 2 + 30 + 20_000
    assert rounds == [
        [Request("stock", "GET", "/a", (("sku", "7"), ("all", "true")), None)],
        [Request("price", "POST", "/bc", (), b'{"n":2}')],
        [Request("stock", "GET", "/a", (("sku", "7"), ("all", "true")), None)],
    ]
    assert [(one.service, one.ordinal) for one in read_recorded(known)] == [
        ("stock", 0),
        ("price", 0),
        ("stock", 1),
    ]
    again = load_scorer(*spec_of(body)).score(step_fact(), BEFORE, AFTER, known)
    assert again.body() == score.body()


def test_what_is_gathered_is_asked_at_once() -> None:
    rounds: list[list[Request]] = []
    score, _ = play(
        "async def two(s):\n"
        "    a = await s.get('/a')\n"
        "    return a.json()['n'] + (await s.get('/ab')).json()['n']\n"
        + DECLARED
        + "async def score(t, services):\n"
        "    stock, price = services['stock'], services['price']\n"
        "    x, y, z = await services.gather(two(stock), price.get('/abc'), two(price))\n"
        "    return x + 10 * y.json()['n'] + 100 * z\n",
        rounds,
    )
    assert score.value == 5 + 40 + 500
    assert [[(r.service, r.path) for r in one] for one in rounds] == [
        [("stock", "/a"), ("price", "/abc"), ("price", "/a")],
        [("stock", "/ab"), ("price", "/ab")],
    ]


@pytest.mark.parametrize(
    "then",
    [
        "await s.get(f'/{len(seen)}')",  # another path
        "await s.get('/a', params={'n': len(seen)})",  # other params
        "await s.post('/a', json=len(seen))",  # another body
        "(await s.get('/a')) if len(seen) == 1 else None",  # nothing more
    ],
)
def test_a_function_that_asks_differently_when_run_again(then: str) -> None:
    error = refusal(
        "seen = []\n" + DECLARED + "async def score(t, services):\n"
        f"    s = services['stock']\n    seen.append(1)\n    {then}\n    return 1\n"
    )
    assert error.code == "reward_nondeterministic"
    assert "stock" in error.message


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("await services['risk'].get('/')", "service_not_declared", "no service 'risk'"),
        ("await services['stock'].get('http://elsewhere/')", "reward_raised", "begin with one /"),
        ("await services['stock'].get('//elsewhere/')", "reward_raised", "begin with one /"),
        ("await services['stock'].get('/../admin')", "reward_raised", "holds .."),
        ("await services['stock'].get('/a?b=c')", "reward_raised", "params are for queries"),
        ("await services['stock'].get('/', params={'a': None})", "reward_raised", "NoneType"),
        ("await services['stock'].post('/', json={'a': float('nan')})", "reward_raised", "JSON"),
        ("await services['stock'].post('/', json='x' * 300_000)", "reward_raised", "262144"),
        ("await services['stock'].request('TRACE', '/')", "reward_raised", "TRACE"),
        ("while True: await services['stock'].get('/')", "reward_invalid", "over 64 calls"),
        (
            "try: await services['stock'].get('/')\n    except BaseException: pass\n"
            "    await services['stock'].get('/')",
            "reward_invalid",
            "cannot be abandoned",
        ),
    ],
)
def test_what_cannot_be_asked(body: str, code: str, told: str) -> None:
    error = refusal(DECLARED + f"async def score(t, services):\n    {body}\n    return 1\n")
    assert error.code == code
    assert told in error.message


@pytest.mark.parametrize(
    "way_out", ["except BaseException: raise ValueError('x')", "finally: 1 / 0", "except: return 5"]
)
def test_what_a_function_does_while_it_is_abandoned_is_no_outcome(way_out: str) -> None:
    body = (
        "async def score(t, services):\n"
        "    try: found = await services['stock'].get('/a')\n"
        f"    {way_out}\n"
        "    return found.status\n"
    ).replace("finally: 1 / 0", "finally: 'found' in locals() or 1 / 0")
    score, _ = play(DECLARED + body)
    assert score.value == 200.0


def test_records_that_are_none() -> None:
    scorer = load_scorer(*spec_of("def score(t, services):\n    return 1\n"))
    for bad in (b"x", recorded([])[:0] + b"\x80" + b"\x00", b"\x81\x81\x00"):
        with pytest.raises(RewardError) as caught:
            scorer.score(step_fact(), BEFORE, AFTER, bad)
        assert caught.value.code == "responses_malformed"


def test_a_response_as_text() -> None:
    latin = Response(
        200, {"content-type": "text/plain; charset=latin-1"}, "größe".encode("latin-1")
    )
    assert latin.text == "größe"
    assert Response(200, {"content-type": "text/plain; charset=no-such"}, b"a").text == "a"
    assert Response(200, {}, "größe".encode()).text == "größe"


def test_the_services_of_a_function() -> None:
    services = Services(["a"])
    assert (list(services), len(services), "a" in services, "b" in services) == (
        ["a"],
        1,
        True,
        False,
    )


def test_requests_cross_the_pipe_and_only_requests_do() -> None:
    asked = Request("stock", "POST", "/a", (("b", "c"), ("b", "d")), b"{}")
    outcomes = [b"body", Needs((asked, asked))]
    assert read_reply(reply(outcomes), 2) == outcomes
    task = Task("spec", b"f", b"o", b"n", b"responses")
    assert read_request(request([task], {}, []))[2] == [task]
    for wrong in (
        asked._replace(method="CONNECT"),
        asked._replace(path="http://elsewhere"),
        asked._replace(service=3),  # type: ignore[arg-type]
        asked._replace(body="text"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"."):
            read_reply(reply([Needs((wrong,))]), 1)
    assert malformed(asked) is None
