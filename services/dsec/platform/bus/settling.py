"""Settling messages: acknowledgements that may be lost, and signs of life while one is handled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from dsec.platform.bus.message import Message

log = logging.getLogger(__name__)


class Signals:
    """Tells the server, until cancelled, that a message is being worked on."""

    def __init__(self, message: Message, period_s: float) -> None:
        self._message = message
        self._period_s = period_s
        # A timer and not a task: it costs nothing for the many that are done before it is due.
        self._timer = asyncio.get_running_loop().call_later(period_s, self._signal)
        self._task: asyncio.Task[None] | None = None

    def _signal(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(settle(self._message.in_progress()))
        self._timer = loop.call_later(self._period_s, self._signal)

    def cancel(self) -> None:
        """The message is settled."""
        self._timer.cancel()


async def settle(answer: Awaitable[None]) -> None:
    """Send an acknowledgement of any kind. One that is lost means one more delivery, no harm."""
    try:
        await answer
    except Exception as error:  # noqa: BLE001 - the client's errors are not for services to know
        log.warning("an acknowledgement was not sent: %r", error)
