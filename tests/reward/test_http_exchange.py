"""What an outside service may do to a request, and what must never be told of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import pytest

from dsec.platform.http_client import open_session, retry_after_s
from dsec.platform.permits import read_ledger
from dsec.platform.secrets import HeaderUnfit, filled_headers, hidden, hidden_text, hidden_value
from dsec.reward.http_exchange import (
    Again,
    Client,
    ServiceFailed,
    exchange,
    exchange_batch,
)
from dsec.reward.services import Request, Services, malformed
from dsec.reward.standing import read_standing

SECRETS = {"TOKEN": 's3"cr3t'}
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


@contextlib.asynccontextmanager
async def served(reply: Callable[[bytes], bytes]) -> AsyncIterator[Client]:
    """A client of a server that answers each request with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        writer.write(reply(asked))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    headers = filled_headers({"Authorization": "Bearer ${TOKEN}"}, SECRETS)
    async with open_session() as session:
        yield Client(session, url, headers, SECRETS)
    server.close()


def get(path: str = "/x", **params: str) -> Request:
    return Request("s", "GET", path, tuple(params.items()), None)


def _echoed(asked: bytes) -> bytes:
    return asked.partition(b"uthorization: ")[2].partition(b"\r\n")[0]


@pytest.mark.parametrize(
    "reply",
    [
        lambda asked: OK + b"a bad line: " + _echoed(asked) + b" \x00\r\n\r\n",
        lambda asked: b"HTTP/1.1 " + _echoed(asked) + b"\r\n\r\n",
        lambda asked: OK + b"Content-Type: " + _echoed(asked) + b"\r\n\r\n",
        lambda asked: OK + b"\r\n" + _echoed(asked),
    ],
    ids=["header", "status", "content-type", "body"],
)
async def test_no_secret_comes_back_whatever_a_service_echoes(
    reply: Callable[[bytes], bytes],
) -> None:
    async with served(reply) as client:
        try:
            found = (await exchange(client, get(), "k", 5)).response
            told = f"{found.headers} {found.body!r}"
        except (Again, ServiceFailed) as error:
            told = str(error)
    assert "cr3t" not in told
    assert "***" in told


@pytest.mark.parametrize("value", ["s3cr3t\n", "s3cr3t\u20ac", "a\r\nX-Other: s3cr3t"])
def test_a_secret_that_no_header_can_hold_is_told_of_and_not_told(value: str) -> None:
    with pytest.raises(HeaderUnfit, match="line break") as failed:
        filled_headers({"X-Key": "Bearer ${KEY}"}, {"KEY": value})
    assert "s3cr3t" not in str(failed.value)


def test_secrets_are_hidden_as_errors_json_and_urls_write_them() -> None:
    secrets = {"A": 'p"w\n', "B": "x y/z"}
    for text in ('p"w', r"b'p\"w\n'", r'{"you": "p\"w"}', "x%20y%2Fz", "Bearer x y/z"):
        assert "***" in hidden_text(text, secrets), text
        assert b"***" in hidden(text.encode(), secrets)
    assert hidden_value({"x y/z": ["x y/z", 1, b"x y/z"]}, secrets) == {"***": ["***", 1, b"***"]}


@pytest.mark.parametrize(
    "header",
    [
        "Mon, 99999999999 Nov 99999999999999 00:00:00 GMT",
        "Mon, 01 Jan 0001 00:00:00 +2359",
        "nan",
        "9" * 5000,
        "-1",
    ],
)
async def test_any_retry_after_is_a_number_of_seconds(header: str) -> None:
    assert (retry_after_s(header, datetime.now(UTC)) or 0.0) >= 0
    reply = OK.replace(b"200", b"429") + f"Retry-After: {header}\r\n\r\n".encode()
    async with served(lambda _: reply) as client:
        assert (await exchange(client, get(), "k", 5)).response.status == 429


async def test_answers_to_a_batch_that_nobody_can_read() -> None:
    deep = b'{"responses": [{"status": 200, "json": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
    async with served(lambda _: OK + b"\r\n" + deep) as client:
        with pytest.raises(ServiceFailed, match="no batch of responses"):
            await exchange_batch(client, "/batch", [get()], "k", 5)


@pytest.mark.parametrize(
    "path",
    ["/%2e%2e/admin", "/a/%2E./b", "/..%2fadmin", "/a/..;x=1/b", "/a%5c..%5cb", "/a\nb", "/.."],
)
def test_a_path_stays_below_the_base_url(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        Services(["s"])["s"].get(path)


def test_what_cannot_be_sent_is_no_request() -> None:
    assert "surrogate" in str(malformed(get(q="\ud800")))
    assert "no JSON" in str(malformed(Request("s", "POST", "/x", (), b"{")))
    assert "no JSON" in str(malformed(Request("s", "POST", "/x", (), b"[" * 100_000)))
    assert malformed(get("/a%2Fb/c.d", q="\u20ac")) is None


@pytest.mark.parametrize("value", [b"", b"nonsense", b"[1]", b'["a", 2]', b"[NaN, 0]", b"{}"])
def test_what_is_no_budget_stops_nobody(value: bytes) -> None:
    assert read_ledger(value) == read_ledger(b"")


def test_what_a_newer_version_shares_is_read_and_what_is_none_stops_nobody() -> None:
    told = b'{"mode": "deferred", "reports": {"r": {"at": 1.0, "more": 2}}, "more": 3}'
    found = read_standing(told)
    assert (found.mode, found.reports["r"].at) == ("deferred", 1.0)
    for value in (b"nonsense", b"[]", b'{"reports": {"r": 1}}', b'{"mode": "deferred"}'):
        assert read_standing(value) == read_standing(b"")


async def test_an_answer_is_asked_for_unpacked() -> None:
    """One that is cut short in a packing can pass for a whole answer."""
    asked: list[bytes] = []

    def reply(request: bytes) -> bytes:
        asked.append(request.lower())
        return OK + b"\r\n1"

    async with served(reply) as client:
        assert (await exchange(client, get(), "k", 5)).response.body == b"1"
    assert b"accept-encoding: identity\r\n" in asked[0]
