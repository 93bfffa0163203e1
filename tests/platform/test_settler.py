"""Messages of a real nats-server, worked on and settled: each in the way that its work ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import nats
import nats.js.errors
import pytest
from pydantic import TypeAdapter

from dsec.platform.bus import BadMessage, Bus, Consumer, Later, Message, Settler
from dsec.platform.clock import utc_now
from dsec_contracts import (
    Envelope,
    Event,
    SessionCancelRequested,
    UnknownEvent,
    subjects,
)
from dsec_contracts.session import CancelFact

pytestmark = pytest.mark.nats
SESSION = UUID("01a22b62-cb9a-7845-b0fc-9a0059a193e6")
DURABLE = "settled"
ACK_WAIT_S = 1.5
WAIT_S_MAX = 20.0
NEVER_S = 60.0
"""A wait that no test sees the end of."""

Work = Callable[[Message], Awaitable[None]]


@dataclass
class Rig:
    """A stream, its durable, and what was worked on."""

    bus: Bus
    consumer: Consumer
    begun: list[Message] = field(default_factory=list)
    settler: Settler = field(init=False)

    def settle_with(self, work: Work, **bounds: Any) -> None:
        """Have messages worked on by this."""

        async def noted(message: Message) -> None:
            self.begun.append(message)
            await work(message)

        usual = {"ack_wait_s": ACK_WAIT_S, "retry_s_min": 0.05, "retry_s_max": NEVER_S}
        self.settler = Settler(self.bus, DURABLE, noted, **usual | bounds)

    async def send(self, count: int = 1) -> None:
        """Publish messages."""
        event: Event = SessionCancelRequested(fact=CancelFact(session_id=SESSION))
        for n in range(count):
            await self.bus.publish(
                event, SESSION, source="test", time=utc_now(), event_id=f"e{n}", session_id=SESSION
            )

    async def next(self, timeout_s: float = WAIT_S_MAX) -> Message:
        """The next delivery."""
        [message] = await self.consumer.fetch(1, timeout_s)
        return message

    async def handle(self, deliveries: int = 1) -> None:
        """Handle the next deliveries, one after the other."""
        for _ in range(deliveries):
            await self.settler.handle(await self.next())

    async def is_settled(self) -> None:
        """Fails unless everything is acknowledged."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                state = await self.consumer.state()
                if state.pending + state.ack_pending == 0:
                    return
                await asyncio.sleep(0.02)

    async def dead_letters(self) -> list[Message]:
        """What was put aside."""
        consumer = await self.bus.consumer("dead", [subjects.dead_letter(DURABLE)], ack="none")
        count = (await consumer.state()).pending
        found: list[Message] = []
        async with asyncio.timeout(WAIT_S_MAX):
            while len(found) < count:
                found += await consumer.fetch(count, 0.5)
        return found


@pytest.fixture
async def rig(nats_url: str) -> AsyncIterator[Rig]:
    """An empty stream."""
    connection = await nats.connect(nats_url)
    with contextlib.suppress(nats.js.errors.NotFoundError):
        await connection.jetstream().delete_stream(subjects.STREAM)
    await connection.close()
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    subject = subjects.every(SessionCancelRequested.event_name())
    yield Rig(bus, await bus.consumer(DURABLE, [subject], ack_wait_s=ACK_WAIT_S))
    await bus.close()


def failing(error: Exception) -> Work:
    """Work that ends like this."""

    async def work(message: Message) -> None:
        raise error

    return work


async def nothing(message: Message) -> None:
    """Work that is done at once."""


async def test_what_is_done_is_acknowledged(rig: Rig) -> None:
    rig.settle_with(nothing)
    await rig.send(2)
    await rig.handle(2)
    await rig.is_settled()
    assert [message.delivered for message in rig.begun] == [1, 1]


async def no_event(message: Message) -> None:
    raise BadMessage("no event")


async def no_envelope(message: Message) -> None:
    Envelope.parse({})


async def no_model(message: Message) -> None:
    TypeAdapter(int).validate_python("no number")


@pytest.mark.parametrize("work", [no_event, no_envelope, no_model])
async def test_what_no_retry_can_mend_is_put_aside(rig: Rig, work: Work) -> None:
    rig.settle_with(work)
    await rig.send()
    await rig.handle()
    await rig.is_settled()
    [letter] = await rig.dead_letters()
    assert letter.headers["dead-sequence"] == str(rig.begun[0].sequence)
    assert rig.settler.dead_letters == 1


async def test_what_cannot_be_put_aside_comes_again(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.settle_with(no_event)
    rig.settler._consumer = "no name for a subject"
    await rig.send()
    await rig.handle()
    assert "could not be put aside" in caplog.text
    assert (await rig.next()).delivered == 2
    assert rig.settler.dead_letters == 0


async def test_any_other_trouble_comes_again_later_and_later(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rig.settle_with(failing(OSError("away")), retry_s_min=0.1, retry_s_max=0.4)
    await rig.send()
    await rig.handle(4)
    assert [message.delivered for message in rig.begun] == [1, 2, 3, 4]
    assert re.findall(r"again in (\S+) s: OSError\('away'\)", caplog.text) == [
        "0.1",
        "0.2",
        "0.4",
        "0.4",
    ]
    assert not await rig.dead_letters()


@pytest.mark.parametrize("error", [UnknownEvent("session.dreamt.v9"), Later(NEVER_S, "begun")])
async def test_what_has_a_time_of_its_own_waits_for_it(
    rig: Rig, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    rig.settle_with(failing(error), retry_s_max=NEVER_S)
    await rig.send()
    await rig.handle()
    assert f"again in {NEVER_S:.1f} s" in caplog.text
    assert not await rig.consumer.fetch(1, 2 * ACK_WAIT_S)
    assert (await rig.consumer.state()).ack_pending == 1


async def test_long_work_keeps_its_message(rig: Rig) -> None:
    async def long(message: Message) -> None:
        assert not await rig.consumer.fetch(1, 2.5 * ACK_WAIT_S), "delivered to another meanwhile"

    rig.settle_with(long)
    await rig.send()
    await rig.handle()
    await rig.is_settled()
    assert len(rig.begun) == 1


async def test_several_at_a_time_and_no_more(rig: Rig) -> None:
    go = asyncio.Event()

    async def wait(message: Message) -> None:
        await go.wait()

    rig.settle_with(wait, in_flight_max=2)
    await rig.send(3)
    for _ in range(2):
        await rig.settler.begin(await rig.next())
    third = asyncio.create_task(rig.settler.begin(await rig.next()))
    await asyncio.sleep(0.1)
    assert (len(rig.begun), third.done()) == (2, False)
    go.set()
    await asyncio.wait_for(third, WAIT_S_MAX)
    await rig.settler.close(WAIT_S_MAX)
    await rig.is_settled()
    assert len(rig.begun) == 3


async def test_a_close_gives_work_its_time_and_begins_none(rig: Rig) -> None:
    async def short(message: Message) -> None:
        await asyncio.sleep(0.2)

    rig.settle_with(short, in_flight_max=2)
    await rig.send(2)
    await rig.settler.begin(await rig.next())
    await rig.settler.close(WAIT_S_MAX)
    await rig.settler.begin(await rig.next())
    assert len(rig.begun) == 1
    again = await rig.next()
    assert (again.sequence, again.delivered) == (rig.begun[0].sequence + 1, 2)


async def test_what_waits_for_a_place_when_it_closes_is_anothers(rig: Rig) -> None:
    async def endless(message: Message) -> None:
        await asyncio.Event().wait()

    rig.settle_with(endless, in_flight_max=1)
    await rig.send(2)
    await rig.settler.begin(await rig.next())
    second = asyncio.create_task(rig.settler.begin(await rig.next()))
    await asyncio.sleep(0.1)
    assert not second.done()
    await asyncio.wait_for(rig.settler.close(0), WAIT_S_MAX)
    await asyncio.wait_for(second, WAIT_S_MAX)
    assert len(rig.begun) == 1, "nothing is begun once it is closed"
    handed_back = [await rig.next(), await rig.next()]
    assert sorted(message.delivered for message in handed_back) == [2, 2]


async def test_what_is_not_done_when_the_time_is_over_is_anothers(rig: Rig) -> None:
    async def endless(message: Message) -> None:
        await asyncio.Event().wait()

    rig.settle_with(endless, in_flight_max=2)
    await rig.send()
    await rig.settler.begin(await rig.next())
    await asyncio.sleep(0)
    await asyncio.wait_for(rig.settler.close(0), WAIT_S_MAX)
    again = await rig.next()
    assert (again.sequence, again.delivered) == (rig.begun[0].sequence, 2)
