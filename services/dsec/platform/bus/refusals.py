"""What the server refuses a connection's user, made errors of whoever asked for it.

A server answers a publish that is not permitted with a line that names only the subject, at any
later moment; the client hands that line to a callback, and whoever published waits until its
time is over, again and again. Here the callback ends the wait, and the next use of a subject that
was refused while nobody waited says so.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from dsec.platform.bounded import Bounded
from dsec.platform.bus.errors import NotPermitted

log = logging.getLogger(__name__)

REFUSALS_KEPT_MAX = 256
TOLD_AGAIN_S = 30.0
# The client writes what the server says in lower case.
_REFUSED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
_VERBS = {"publish": "publish to", "subscription": "subscribe to"}


def refusal(error: Exception) -> NotPermitted | None:
    """What the server refused, if that is what an error of the client's callback says."""
    found = _REFUSED.search(str(error).lower())
    return NotPermitted(_VERBS[found[1]], found[2]) if found else None


class Repeats:
    """Whether a warning has just been given: a server that is away is an error at every try."""

    def __init__(self) -> None:
        self._told: tuple[str, float] | None = None

    def is_new(self, text: str, now_s: float) -> bool:
        """True for another text than the last one, and for the same one after a while."""
        if self._told is not None:
            last, told_s = self._told
            if text == last and now_s - told_s < TOLD_AGAIN_S:
                return False
        self._told = (text, now_s)
        return True


class GuardedClient(NatsClient):
    """A client whose requests, publishes and fetches fail when the server refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self._asking: dict[str, list[asyncio.Timeout]] = {}
        self._repeats = Repeats()
        self._refused: Bounded[str, NotPermitted] = Bounded(REFUSALS_KEPT_MAX)

    async def on_error(self, error: Exception) -> None:
        """The client's error callback."""
        refused = refusal(error)
        if refused is None:
            if self._repeats.is_new(repr(error), asyncio.get_running_loop().time()):
                log.warning("bus: %r", error)
            return
        log.error("%s", refused)
        self._refused.remember(refused.subject, refused)
        now_s = asyncio.get_running_loop().time()
        answers = refused.verb == _VERBS["subscription"]  # without them, no request ends
        for subject, waits in self._asking.items():
            if answers or subject == refused.subject:
                for wait in waits:
                    wait.reschedule(now_s)

    def raise_if_refused(self, subject: str) -> None:
        """Say once that a subject was refused; after that it is tried again.

        Raises:
            NotPermitted: it was.
        """
        if self._refused and (refused := self._refused.pop(subject.lower(), None)):
            raise refused

    async def heard_out(self, timeout_s: int) -> None:
        """Wait until the server has answered all that was sent before this, refusals included.

        Twice, since the client writes its ping past what still waits to be written.
        """
        await self.flush(timeout_s)
        await self.flush(timeout_s)

    def _raise_if_unanswerable(self) -> None:
        prefix = self._inbox_prefix.decode().lower()
        for subject, refused in self._refused.items():
            if refused.verb == _VERBS["subscription"] and subject.startswith(prefix):
                raise refused

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """The answer to a request. As the client's, and NotPermitted."""
        waits = self._asking.setdefault(subject.lower(), [])
        try:
            async with asyncio.timeout(None) as wait:
                waits.append(wait)
                return await super().request(subject, payload, timeout, old_style, headers)
        except TimeoutError:
            self.raise_if_refused(subject)
            self._raise_if_unanswerable()
            raise
        finally:
            waits.remove(wait)
            if not waits:
                self._asking.pop(subject.lower(), None)

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: dict[str, Any] | None = None,
    ) -> None:
        """Send. As the client's, and NotPermitted if the one before it was refused."""
        self.raise_if_refused(subject)
        await super().publish(subject, payload, reply, headers)
