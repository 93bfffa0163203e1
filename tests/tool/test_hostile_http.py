"""HTTP tools against servers that mean no good: a reason each, within the deadline."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

import pytest
from tests.tool.raw_server import RawServer, head, raw_server, saying

from dsec.platform.user_limits import UserLimits
from dsec.session.documents import ToolDocument, seal
from dsec.tool.call import Tool, load
from dsec.tool.frames import Failure, Order, Outcome
from dsec.tool.processes import Processes, Program
from dsec_contracts import decode

pytestmark = pytest.mark.long

MEMORY_BYTES_MAX = 1 << 30


@cache
def bomb() -> bytes:
    """A few kilobytes that say a quarter of a gigabyte, twice packed."""
    return gzip.compress(gzip.compress(bytes(1 << 28)))


def _drips(connection: socket.socket, _: bytes) -> None:
    connection.sendall(head())
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


def _floods(connection: socket.socket, _: bytes) -> None:
    connection.sendall(head(kind="text/plain"))
    while True:
        connection.sendall(b"x" * 100_000)


def _refuses_without_end(connection: socket.socket, _: bytes) -> None:
    connection.sendall(head("429 Slow down", "text/plain", "Retry-After: 7") + b"slow down")
    time.sleep(30)


def _many_headers(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for n in range(1_000_000):
        connection.sendall(f"X-{n}: {'x' * 1000}\r\n".encode())


def _informs(connection: socket.socket, _: bytes) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")
        time.sleep(0.01)


def _echoes(connection: socket.socket, asked: bytes) -> None:
    connection.sendall(head("400 Bad", "text/plain") + asked)


def _bombs(connection: socket.socket, _: bytes) -> None:
    packed = gzip.decompress(bomb())
    connection.sendall(head("200 OK", "text/plain", "Content-Encoding: gzip") + packed)


def _bombs_twice(connection: socket.socket, _: bytes) -> None:
    connection.sendall(head("200 OK", "text/plain", "Content-Encoding: gzip, gzip") + bomb())


SAYINGS = {
    "drips": _drips,
    "floods": _floods,
    "silent": lambda *_: time.sleep(30),
    "refuses": _refuses_without_end,
    "informs": _informs,
    "many-headers": _many_headers,
    "echoes": _echoes,
    "bomb": _bombs,
    "bomb-twice": _bombs_twice,
    "no-gzip": saying(head("200 OK", "text/plain", "Content-Encoding: gzip") + b"not at all"),
    "no-packing": saying(head("200 OK", "text/plain", "Content-Encoding: br") + b"not at all"),
    "no-charset": saying(head(kind="text/plain; charset=no-such") + b"text"),
    "no-kind": saying(head(kind="\xff;;=") + b"text"),
    "long-header": saying(b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 24)),
    "no-http": saying(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "nothing": saying(b""),
    "no-status": saying(b"HTTP/1.1 99999 What\r\n\r\n"),
    "two-lengths": saying(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy"),
    "no-length": saying(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nxy"),
    "no-chunk": saying(head("200 OK", "text/plain", "Transfer-Encoding: chunked") + b"zz\r\nxx"),
    "deep": saying(head() + b"[" * 900_000),
    "later": saying(head("202 Accepted") + b'{"job": 7}'),
    "to-private": saying(head("302 Found", "text/plain", "Location: http://169.254.169.254/x")),
    "to-file": saying(head("307 There", "text/plain", "Location: file:///etc/passwd")),
    "fine": saying(head() + b"1"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RawServer]:
    with raw_server(SAYINGS) as made:
        yield made


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    made = Processes(UserLimits(MEMORY_BYTES_MAX, 64, 1 << 20, 8), 2)
    yield made
    await made.close()


def _program(url: str, **options: Any) -> Program:
    document = ToolDocument(name="tool", kind="http", url=url, **options)
    values = dict.fromkeys(document.secret_names, "hush/hush")
    return Program(*seal("tool", document, {}), values)


def asked(url: str, **options: Any) -> Outcome:
    """The outcome in this process, for what ends by itself."""
    program = _program(url, **options)
    tool = load(program.spec_hash, program.content, program.secrets)
    assert isinstance(tool, Tool)
    return tool.call(Order("{}", "key"))


async def outcome_of(processes: Processes, program: Program, deadline_s: float = 20.0) -> Outcome:
    process = await processes.take(program)
    return await processes.call(process, Order("{}", "key"), deadline_s)


@pytest.mark.parametrize(
    ("path", "code", "told"),
    [
        ("floods", "output_too_large", "output_bytes_max"),
        ("bomb", "output_too_large", "output_bytes_max"),
        ("no-gzip", "http_broken", "gzip"),
        ("long-header", "http_broken", ""),
        ("many-headers", "http_broken", ""),
        ("no-http", "http_broken", ""),
        ("nothing", "http_broken", "disconnected"),
        ("no-status", "http_broken", ""),
        ("two-lengths", "http_broken", ""),
        ("no-length", "http_broken", ""),
        ("no-chunk", "http_broken", ""),
        ("deep", "result_invalid", "not the JSON"),
        ("to-private", "http_status", "HTTP 302"),
        ("to-file", "http_status", "HTTP 307"),
    ],
)
def test_what_a_server_may_say(server: RawServer, path: str, code: str, told: str) -> None:
    before, began = len(server.heads), time.monotonic()
    outcome = asked(f"{server.url}/{path}")
    assert isinstance(outcome, Failure), decode(outcome)
    assert outcome.code == code, outcome
    assert told in outcome.message
    assert outcome.message.isprintable() or "\n" in outcome.message
    assert time.monotonic() - began < 10
    assert len(server.heads) == before + 1  # asked once, and nobody else was


@pytest.mark.parametrize("path", ["no-charset", "no-kind"])
def test_a_text_whose_kind_nobody_knows_is_a_text(server: RawServer, path: str) -> None:
    outcome = asked(f"{server.url}/{path}")
    assert isinstance(outcome, bytes), outcome
    assert decode(outcome) == "text"


@pytest.mark.parametrize("path", ["bomb-twice", "no-packing"])
def test_a_packing_that_was_not_asked_for_is_no_hang(server: RawServer, path: str) -> None:
    """Whether it is unpacked or refused is the client's; it is bounded."""
    outcome = asked(f"{server.url}/{path}")
    assert isinstance(outcome, Failure) or len(outcome) < 1 << 21


def test_an_answer_that_says_that_it_comes_later_is_a_declaration_that_does_not_fit(
    server: RawServer,
) -> None:
    outcome = asked(f"{server.url}/later")
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retryable) == ("declaration_misfit", False)
    assert "accepted_is_result" in outcome.message
    told = asked(f"{server.url}/later", accepted_is_result=True)
    assert isinstance(told, bytes), told
    assert decode(told) == {"job": 7}


def test_a_refusal_keeps_its_status_though_its_body_never_ends(server: RawServer) -> None:
    began = time.monotonic()
    outcome = asked(f"{server.url}/refuses")
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.retryable, outcome.retry_after_s) == ("http_status", True, 7.0)
    assert outcome.message == "HTTP 429: slow down"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("path", ["drips", "silent", "informs"])
async def test_who_never_comes_to_the_point_costs_the_deadline_and_no_neighbour(
    processes: Processes, server: RawServer, path: str
) -> None:
    process = await processes.take(_program(f"{server.url}/{path}"))
    began = time.monotonic()
    outcome = await processes.call(process, Order("{}", "key"), 2.5)
    assert isinstance(outcome, Failure)
    assert outcome.code == "deadline"
    assert time.monotonic() - began < 6
    fine = await outcome_of(processes, _program(f"{server.url}/fine"))
    assert isinstance(fine, bytes)


async def test_a_secret_that_a_server_echoes_is_not_told(
    processes: Processes, server: RawServer
) -> None:
    program = _program(f"{server.url}/echoes", headers={"X-Key": "${KEY}"}, secrets=["KEY"])
    outcome = await outcome_of(processes, program)
    assert b"hush/hush" in server.heads[-1]
    assert isinstance(outcome, Failure)
    assert outcome.code == "http_status"
    assert "***" in outcome.message
    assert "hush" not in outcome.message


@pytest.mark.parametrize("value", ["..", ".", "a/../../secret", "%2e%2e", "x\r\nX-More: 1"])
def test_an_argument_leads_to_no_other_path_and_to_no_other_header(
    server: RawServer, value: str
) -> None:
    document = ToolDocument(
        name="tool",
        kind="openapi",
        method="GET",
        url=server.url + "/items/{id}/fine",
        operation="get",
        places={"id": "path", "X-Note": "header"},
    )
    for name in ("id", "X-Note"):
        tool, before = load(*seal("tool", document, {}), {}), len(server.heads)
        assert isinstance(tool, Tool)
        outcome = tool.call(Order(json.dumps({"id": "1"} | {name: value}), "key"))
        if isinstance(outcome, Failure):
            assert outcome.code == "arguments_invalid"
            assert len(server.heads) == before
            continue
        target = server.heads[-1].split(b" ")[1]
        assert target.startswith(b"/items/")
        assert target.count(b"/") == 3
        assert b"\r\nX-More" not in server.heads[-1]
