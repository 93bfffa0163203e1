"""Quotas and attempts: what may be used up, what waits, and what is tried again."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from tests.tool.conftest import Rig, spec_of

from dsec.platform.bus import Bus
from dsec.platform.http_client import retry_after_s
from dsec.session.documents import seal
from dsec.session.tool_document import Quota, ToolDocument
from dsec.tool import attempts
from dsec.tool.frames import Failure, Outcome, Refused
from dsec.tool.quotas import Quotas, used_up
from dsec_contracts import ToolFailed, ToolRetried

BUSY = Failure("http_status", "HTTP 429", retryable=True)


class Busy(BaseHTTPRequestHandler):
    """Refuses as often as the path says, then answers; `/0` always."""

    seen: ClassVar[list[tuple[float, str]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((time.monotonic(), self.headers["Idempotency-Key"]))
        refusals = int(self.path.strip("/")) or 1_000
        ok = len(self.seen) > refusals
        data = json.dumps("done" if ok else "slow down").encode()
        self.send_response(200 if ok else 429)
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After", "1")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def busy() -> Iterator[str]:
    Busy.seen = []
    made = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()


def http(url: str, **options: Any) -> tuple[str, bytes]:
    return seal("tool", ToolDocument(name="tool", kind="http", url=url, **options), {})


# -- attempts --------------------------------------------------------------------------------------


async def outcome_of(
    outcomes: list[Outcome], attempts_max: int, deadline_s: float = 30.0
) -> tuple[Outcome, int, list[tuple[int, str, float]]]:
    left, told = list(outcomes), list[tuple[int, str, float]]()

    async def attempt() -> Outcome:
        return left.pop(0)

    async def on_retry(number: int, failure: Failure, pause_s: float) -> None:
        told.append((number, failure.code, pause_s))

    return (*await attempts.made(attempt, attempts_max, deadline_s, on_retry), told)


async def test_a_call_is_made_again_while_that_might_do_better() -> None:
    outcome, made, told = await outcome_of([BUSY, BUSY, b"x"], 3)
    assert (outcome, made) == (b"x", 3)
    assert [(number, code) for number, code, _ in told] == [(1, "http_status"), (2, "http_status")]
    assert all(0 <= pause_s <= 2 * attempts.PAUSE_S_MIN for *_, pause_s in told)
    assert len({pause_s for *_, pause_s in told}) == 2  # random: callers part
    assert (await outcome_of([BUSY] * 3, 2))[:2] == (BUSY, 2)
    final = Failure("http_status", "HTTP 400")
    assert (await outcome_of([final, b"x"], 3))[:2] == (final, 1)
    assert (await outcome_of([BUSY, b"x"], 1))[:2] == (BUSY, 1)


async def test_whoever_asks_to_be_left_alone_is() -> None:
    asks = Failure("http_status", "HTTP 429", retryable=True, retry_after_s=0.5)
    began = time.monotonic()
    assert (await outcome_of([asks, b"x"], 2))[0] == b"x"
    assert time.monotonic() - began >= 0.5
    # A pause that the deadline does not have is not begun.
    asks = Failure("http_status", "HTTP 429", retryable=True, retry_after_s=60.0)
    began = time.monotonic()
    outcome, made, _ = await outcome_of([asks, b"x"], 2, deadline_s=30.0)
    assert (outcome, made) == (asks, 1)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-1", None),
        ("nan", None),
        ("soon", None),
        ("Mon, 02 Mar 2026 09:30:10 GMT", 10.0),
        ("Mon, 02 Mar 2026 09:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, datetime(2026, 3, 2, 9, 30, tzinfo=UTC)) == seconds


@pytest.mark.nats
@pytest.mark.postgres
async def test_a_busy_server_is_asked_again_under_the_same_key(rig: Rig, busy: str) -> None:
    tool = http(f"{busy}/2", idempotent=True, attempts_max=3)
    once = http(f"{busy}/0", idempotent=True)
    await rig.know(tool, once)
    rig.start()
    await rig.call(tool[0])
    assert await rig.answered() == ["done"]
    times, keys = zip(*Busy.seen, strict=True)
    assert len(set(keys)) == 1
    assert len(keys) == 3
    assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(times))
    assert rig.answers[0][1].circumstance.attempts == 3
    consumer = await rig.bus.consumer("test-retried", ["dsec.tool.retried.*"], ack="none")
    retried = [message.event() for message in await consumer.fetch(10, 1)]
    retried += [message.event() for message in await consumer.fetch(10, 1)]
    assert [
        (e.fact.attempt, e.circumstance.code) for e in retried if isinstance(e, ToolRetried)
    ] == [
        (1, "http_status"),
        (2, "http_status"),
    ]
    await rig.call(once[0], step=1)
    await rig.until(lambda: len(rig.answers) == 2)
    assert len(Busy.seen) == 4  # which does not say that it may be


# -- quotas ----------------------------------------------------------------------------------------


def test_what_a_session_has_used_up() -> None:
    quota = Quota(calls_per_session=2)
    assert used_up(quota, "t", 1, 9, None) is None
    assert "its 2 calls of t" in (used_up(quota, "t", 2, 2, None) or "")
    assert used_up(Quota(), "t", 9, 9, 10) is None
    assert "tool_calls_max" in (used_up(Quota(), "t", 0, 10, 10) or "")


@pytest.fixture
async def replicas(nats_url: str) -> AsyncIterator[list[Quotas]]:
    """The quotas of two replicas, in a bucket of the test's own."""
    bus, name = await Bus.connect(nats_url, "test"), f"test_{uuid.uuid4().hex}"
    await bus.ensure_stream()
    made = [Quotas(partial(bus.bucket, name), f"r{n}", time.time) for n in range(2)]
    yield made
    for quotas in made:
        quotas.close()
    await bus.close()


@pytest.mark.nats
async def test_calls_of_a_tool_wait_for_each_other_within_their_deadlines(
    replicas: list[Quotas],
) -> None:
    """Over all replicas."""
    loop, together = asyncio.get_running_loop(), [0, 0]

    async def call(quotas: Quotas, deadline_s: float) -> str:
        try:
            async with quotas.place("a", Quota(concurrency=2), loop.time() + deadline_s):
                together[0] += 1
                together[1] = max(together)
                await asyncio.sleep(0.3)
                together[0] -= 1
        except Refused as refused:
            return refused.failure.code
        return "made"

    calls = [call(replicas[n % 2], 20) for n in range(6)]
    made = await asyncio.gather(*calls, call(replicas[0], 0.1))
    assert made == ["made"] * 6 + ["quota"]
    assert together == [0, 2]


@pytest.mark.nats
async def test_a_rate_spaces_calls_and_refuses_what_would_be_late(replicas: list[Quotas]) -> None:
    """Over all replicas."""
    loop = asyncio.get_running_loop()
    began, quota = loop.time(), Quota(per_s=10)
    await asyncio.gather(*(replicas[n % 2].moment("a", quota, began + 20) for n in range(12)))
    assert 1.0 <= loop.time() - began < 15
    await replicas[0].moment("b", Quota(per_s=0.1), loop.time() + 5.0)
    with pytest.raises(Refused, match=r"0\.1 calls a second"):
        await replicas[1].moment("b", Quota(per_s=0.1), loop.time() + 1.0)


@pytest.mark.nats
@pytest.mark.postgres
@pytest.mark.nats
async def test_who_holds_a_place_is_known_however_many_tools_come_after(
    replicas: list[Quotas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.tool.quotas.TOOLS_KEPT_MAX", 1)
    quotas, loop, one = replicas[0], asyncio.get_running_loop(), Quota(concurrency=1)
    async with quotas.place("a", one, loop.time() + 5):
        async with quotas.place("b", one, loop.time() + 5):
            pass
        with pytest.raises(Refused):
            async with quotas.place("a", one, loop.time() + 0.3):
                pass
    async with quotas.place("a", one, loop.time() + 5):
        pass


@pytest.mark.nats
async def test_who_waits_for_a_moment_has_it_however_many_tools_come_after(
    replicas: list[Quotas], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.tool.quotas.TOOLS_KEPT_MAX", 1)
    quotas, loop, slow = replicas[0], asyncio.get_running_loop(), Quota(per_s=2)
    waiting = [asyncio.create_task(quotas.moment("a", slow, loop.time() + 10)) for _ in range(4)]
    await quotas.moment("b", slow, loop.time() + 10)
    await asyncio.gather(*waiting)


async def test_a_call_beyond_a_quota_is_not_made(rig: Rig) -> None:
    tool = rig.effect(quota={"calls_per_session": 3})
    slow = spec_of("import time\ndef tool(): time.sleep(2)", quota={"concurrency": 1})
    await rig.know(tool, slow)
    rig.start()
    await rig.call(tool[0], tool[0], calls_before=1)  # the second and the third
    await rig.answered(2)
    await rig.call(tool[0], step=1, calls_before=3)
    await rig.call(tool[0], step=2, calls_max=5)
    await rig.until(lambda: len(rig.answers) == 4)
    codes = {
        (e.fact.step, e.fact.index): e.fact.code if isinstance(e, ToolFailed) else "made"
        for _, e in rig.answers
    }
    assert codes[1, 0] == "quota"
    assert [codes[0, 0], codes[0, 1], codes[2, 0]] == ["made"] * 3
    await rig.call(slow[0], step=4, deadline_s=1.0)
    await rig.call(slow[0], step=5, deadline_s=1.0)
    await rig.until(lambda: len(rig.answers) == 6)
    told = sorted(e.fact.code for _, e in rig.answers[4:] if isinstance(e, ToolFailed))
    assert told == ["deadline", "quota"]


@pytest.mark.nats
@pytest.mark.postgres
async def test_status_shows_a_call_that_waits_with_its_attempts_and_its_last_error(
    rig: Rig, busy: str
) -> None:
    tool = http(f"{busy}/0", idempotent=True, attempts_max=16)
    await rig.know(tool)
    rig.start()
    await rig.call(tool[0], deadline_s=25.0)
    await rig.until(lambda: len(Busy.seen) >= 3)
    command = [sys.executable, "-m", "dsec.cli", "tools", "status", "--pending", "--json"]
    env = os.environ | {"DSEC_NATS_URL": rig.nats_url, "DSEC_DATABASE_URL": rig.database_url}
    done = await asyncio.to_thread(
        subprocess.run, command, env=env, capture_output=True, timeout=60, check=True
    )
    (call,) = json.loads(done.stdout)
    assert (call["call_id"], call["tool"], call["status"]) == ("call_0_0_0", "t0", "waiting")
    assert call["deadline_s"] == 25.0
    assert 2 < call["age_s"] < 30
    assert 3 <= call["attempts"] <= len(Busy.seen) + 1
    assert call["last_error"] == 'http_status: HTTP 429: "slow down"'
