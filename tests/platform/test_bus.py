"""The bus on a real nats-server: what it takes, what it refuses, and what it says of messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import api

from dsec.platform.bus import (
    Author,
    BadMessage,
    Bus,
    BusError,
    BusUnavailable,
    Message,
    PublishRefused,
    StreamOptions,
    TooLarge,
    connection,
)
from dsec.platform.bus.publisher import HEADERS_BYTES_MAX
from dsec.platform.bus.retry import Retry
from dsec.platform.clock import utc_now
from dsec.platform.stack.nats_server import NatsServerOptions, nats_server_process
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.process import ChildProcess
from dsec_contracts import SessionCancelRequested, SessionEnded, subjects
from dsec_contracts.envelope import Envelope
from dsec_contracts.session import CancelCircumstance, CancelFact

pytestmark = pytest.mark.nats
SESSION = UUID("01a22b62-cb9a-7845-b0fc-9a0059a193e6")
LIMIT_BYTES = 200_000
WAIT_S_MAX = 30.0


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus with a stream, on a server of its own that takes little."""
    options = NatsServerOptions(
        directory=tmp_path / "nats",
        log_path=tmp_path / "nats.log",
        port=free_port(),
        password="x",
        max_payload_bytes=LIMIT_BYTES,
    )
    child = ChildProcess(nats_server_process(options))
    await child.wait_ready()
    bus = await Bus.connect(options.url, "test")
    bus.url = options.url  # type: ignore[attr-defined]
    await bus.ensure_stream()
    try:
        yield bus
    finally:
        await bus.close()
        await child.stop()


def cancel(reason: str = "") -> SessionCancelRequested:
    return SessionCancelRequested(
        fact=CancelFact(session_id=SESSION), circumstance=CancelCircumstance(reason=reason)
    )


async def received(bus: Bus, name: str, count: int) -> list[Message]:
    consumer = await bus.consumer(name, ["dsec.>"])
    found: list[Message] = []
    async with asyncio.timeout(WAIT_S_MAX):
        while len(found) < count:
            found += await consumer.fetch(count, 2.0)
    await consumer.close()
    return found


async def publish_event(bus: Bus, reason_chars: int) -> int:
    author = Author(bus, "test", lambda: datetime(2026, 1, 1, tzinfo=UTC))
    told = CancelCircumstance.model_construct(reason="r" * reason_chars, code="cancelled")
    event = cancel().model_copy(update={"circumstance": told})
    return await author.publish(event, SESSION, "e", "cause", session_id=SESSION)


async def test_an_event_is_taken_up_to_the_servers_limit_to_the_byte(bus: Bus) -> None:
    with pytest.raises(TooLarge) as found:
        await publish_event(bus, LIMIT_BYTES)
    fits = LIMIT_BYTES - (found.value.size_bytes - LIMIT_BYTES)
    for over in (3, 1):
        with pytest.raises(TooLarge) as found:
            await publish_event(bus, fits + over)
        assert found.value.size_bytes == LIMIT_BYTES + over
    assert (await bus.stream_state()).messages == 0, "what is too large is not sent"
    # The client is as it was: the server closes the connection of one that sends too much.
    assert await publish_event(bus, fits) == 1
    assert bus.connected


@pytest.mark.parametrize("value", ["plain", "  stripped ", "ünïcödé ✓", "two\nlines"])
async def test_sizes_are_exact_for_any_header(bus: Bus, value: str) -> None:
    headers = {"x-one": value, "x-two": value * 3}
    with pytest.raises(TooLarge) as found:
        await bus.publish_raw("dsec.session.requested.x", b"b" * LIMIT_BYTES, headers)
    fits = LIMIT_BYTES - (found.value.size_bytes - LIMIT_BYTES)
    assert await bus.publish_raw("dsec.session.requested.x", b"b" * fits, headers) == 1
    raw: Any = bus._nc
    closed = asyncio.Event()

    async def on_closed() -> None:
        closed.set()

    raw._disconnected_cb = on_closed
    await raw.publish("dsec.session.requested.x", b"b" * (fits + 1), headers=headers)
    async with asyncio.timeout(WAIT_S_MAX):
        await closed.wait()  # one byte more, and the server does close it: the size is exact


async def test_what_the_client_refuses_is_not_tried_again(bus: Bus) -> None:
    async with asyncio.timeout(WAIT_S_MAX):  # a twentieth of what is tried again
        with pytest.raises(BusError, match="BadHeader"):
            await bus.publish_raw("dsec.session.requested.x", b"", {"no name": "x"})


async def test_a_message_says_what_its_consumer_says_of_it(bus: Bus) -> None:
    before = utc_now()
    await publish_event(bus, 1)
    consumer = await bus.consumer("c", ["dsec.>"], ack_wait_s=0.2)
    (first,) = await consumer.fetch(1, WAIT_S_MAX)
    (again,) = await consumer.fetch(1, WAIT_S_MAX)
    for message, delivered in ((first, 1), (again, 2)):
        assert (message.sequence, message.delivered) == (1, delivered)
        assert message.consumer_sequence == delivered
        metadata = message._raw.metadata
        assert message.time == metadata.timestamp
        assert before - timedelta(seconds=1) < message.time < utc_now() + timedelta(seconds=1)
    assert first.event() == cancel("r")


async def test_a_fetch_takes_what_is_there_without_giving_way_for_each(bus: Bus) -> None:
    """In a process where others need milliseconds a turn, a fetch that gives way is never done."""
    count = 256
    author = Author(bus, "test", utc_now)
    for n in range(count):
        await author.publish(cancel(), SESSION, f"e{n}", "cause", session_id=SESSION)
    consumer = await bus.consumer("test", ["dsec.>"])
    stop = asyncio.Event()

    async def busy() -> int:
        turns = 0
        while not stop.is_set():
            turns += 1
            time.sleep(0.02)  # noqa: ASYNC251 - that is what it is about
            await asyncio.sleep(0)
        return turns

    turns = asyncio.create_task(busy())
    found: list[Message] = []
    while len(found) < count:
        found += await consumer.fetch(count, 5.0)
    stop.set()
    await consumer.close()
    assert [message.delivered for message in found] == [1] * count
    assert await turns < count


def test_deliveries_of_newer_servers_are_read_too() -> None:
    def wrapped(reply: str) -> Message:
        client: Any = None
        return Message.wrap(Msg(client, "dsec.x", reply, b""))

    old = wrapped("$JS.ACK.DSEC.c.3.20.21.1700000000123456789.4")
    new = wrapped("$JS.ACK.hub.hash.DSEC.c.3.20.21.1700000000123456789.4")
    newest = wrapped("$JS.ACK.hub.hash.DSEC.c.3.20.21.1700000000123456789.4.token")
    for message in (old, new, newest):
        assert (message.delivered, message.sequence, message.consumer_sequence) == (3, 20, 21)
        assert message.time == message._raw.metadata.timestamp
    with pytest.raises(BusError, match="no delivery"):
        wrapped("_INBOX.a.b")


def test_an_event_of_another_kind_is_a_bad_message() -> None:
    found = Envelope("e", SessionCancelRequested.event_type(), "test", utc_now()).headers()
    raw: Any = None
    message = Message("dsec.session.ended.x", found, cancel().body(), 1, 1, utc_now(), raw)
    assert message.event_of(SessionCancelRequested) == cancel()
    with pytest.raises(BadMessage, match=r"SessionCancelRequested on dsec\.session\.ended\.x"):
        message.event_of(SessionEnded)


async def test_the_time_at_a_sequence_is_the_time_that_was_delivered(bus: Bus) -> None:
    await bus.fence("w1", "test")
    await publish_event(bus, 1)
    for message in await received(bus, "c", 2):
        assert await bus.message_time(message.sequence) == message.time
    await bus.purge("dsec.session.cancel_requested.*", 3)
    assert await bus.message_time(2) is None
    assert await bus.message_time(3) is None


async def test_an_author_is_held_by_its_fence(bus: Bus) -> None:
    author = Author(bus, "test", utc_now, fence="w1")
    assert await author.publish(cancel(), SESSION, "e1", None) == 1
    await bus.fence("w1", "test")
    with pytest.raises(PublishRefused) as found:
        await author.publish(cancel(), SESSION, "e2", None)
    assert found.value.reason == "fenced"
    (message, _) = await received(bus, "c", 2)
    envelope = message.envelope()
    assert (envelope.source, envelope.id, envelope.subject) == ("test", "e1", None)


async def test_any_message_can_become_a_dead_letter(bus: Bus) -> None:
    """Headers that a server lets in and that our client would not send, or not send prefixed."""
    client = await nats.connect(bus.url)  # type: ignore[attr-defined]
    raw: Any = client
    hostile = [
        b"NATS/1.0\r\nno name: x\r\n\r\n",
        b"NATS/1.0\r\nlong: " + b"x" * (HEADERS_BYTES_MAX - 100) + b"\r\n\r\n",
    ]
    for headers in hostile:
        size = b"%d %d" % (len(headers), len(headers) + 1)
        await raw._send_command(
            b"HPUB dsec.session.requested.x " + size + b"\r\n" + headers + b"b\r\n"
        )
    await client.flush()
    await client.close()
    for message in await received(bus, "c", 2):
        await bus.dead_letter(message, "c", "bad")
    letters = (await received(bus, "d", 4))[2:]
    assert [letter.subject for letter in letters] == [subjects.dead_letter("c")] * 2
    assert [letter.headers["dead-sequence"] for letter in letters] == ["1", "2"]
    assert [letter.headers.get("dead-cut") for letter in letters] == [None, "headers"]


async def test_a_stream_is_made_as_large_as_there_is_room(bus: Bus) -> None:
    wanted = StreamOptions(max_bytes=1 << 50)
    before = (await bus.stream_state()).max_bytes
    await bus.ensure_stream(wanted)
    assert (await bus.stream_state()).max_bytes == before  # what is there stays as it is
    await bus._js.delete_stream("DSEC")
    await bus.ensure_stream(wanted)
    assert 64 << 20 <= (await bus.stream_state()).max_bytes < 1 << 50


async def test_a_stream_that_somebody_changed_is_brought_to_our_settings(bus: Bus) -> None:
    async def live() -> api.StreamConfig:
        return (await bus._js.stream_info("DSEC")).config

    ours = await live()
    theirs = replace(
        ours, discard=api.DiscardPolicy.OLD, duplicate_window=7, subjects=["dsec.session.>"]
    )
    await bus._js.update_stream(theirs)
    await bus.ensure_stream()
    found = await live()
    for name in ("subjects", "discard", "duplicate_window", "max_bytes", "retention", "storage"):
        assert getattr(found, name) == getattr(ours, name), name
    await bus._js.delete_stream("DSEC")
    await bus._js.add_stream(replace(ours, storage=api.StorageType.MEMORY))
    with pytest.raises(BusError, match="cannot be brought to ours"):
        await bus.ensure_stream()


async def test_a_consumer_of_other_settings_is_mended_where_it_stands_or_refused(bus: Bus) -> None:
    async def live() -> api.ConsumerInfo:
        return await bus._js.consumer_info("DSEC", "c")

    first, second = "dsec.session.ended.a", "dsec.session.ended.b"
    for subject in (first, second):
        await bus.publish_raw(subject, b"{}", {})
    made = await bus.consumer("c", [first], ack_wait_s=5, inactive_s=60)
    [message] = await made.fetch(1, 5)
    await message.ack()
    await made.close()

    settings = {"ack_wait_s": 9, "max_ack_pending": 77, "start_sequence": 1}
    mended = await bus.consumer("c", [first, second], **settings)  # type: ignore[arg-type]
    found = await live()
    assert found.config.filter_subjects == [first, second]
    told = found.config
    assert (told.ack_wait, told.max_ack_pending, told.inactive_threshold or 0) == (9, 77, 0)
    [message] = await mended.fetch(10, 5)
    assert message.subject == second, "what was done is not done again"
    with pytest.raises(BusError, match="exists with other settings"):
        await bus.consumer("c", [first, second], ack="none")


async def test_one_server_keeps_nothing_three_times(bus: Bus) -> None:
    with pytest.raises(BusError, match="DSEC_NATS_REPLICAS asks for several nodes, and there is"):
        await bus.ensure_stream(StreamOptions(replicas=3))
    assert (await bus.stream_state()).replicas == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://u:secret@a:1", "nats://a:1"),
        ("nats://u:secret@a:1, nats://u:secret@b:2", "nats://a:1, nats://b:2"),
    ],
)
async def test_several_urls_are_tried_and_none_shows_its_password(
    url: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECTING", Retry(wait_s_max=0.3, pause_s_max=0.1))
    with pytest.raises(BusUnavailable) as found:
        await Bus.connect(url, "test")
    assert f"answers at {shown} within" in str(found.value)
    assert "secret" not in str(found.value)


async def test_the_node_that_answers_is_used(bus: Bus) -> None:
    url: str = bus.url  # type: ignore[attr-defined]
    away = url.rpartition(":")[0] + f":{free_port()}"
    for given in (f"{away},{url}", f"{url},{away}"):
        found = await Bus.connect(given, "test")
        assert found.connected
        await found.close()
