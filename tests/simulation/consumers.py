"""Durable pull consumers of the simulated server, and the messages that they deliver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from nats.js import api
from tests.simulation.clock import START

from dsec_contracts import subjects

if TYPE_CHECKING:
    from tests.simulation.stream import Server

MAX_PAYLOAD_BYTES = 1 << 20
_MESSAGE_OVERHEAD_BYTES = 48


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of the stream."""

    sequence: int
    subject: str
    headers: dict[str, str]
    data: bytes
    time_ns: int

    @property
    def size(self) -> int:
        """About what it takes on disk."""
        return _MESSAGE_OVERHEAD_BYTES + len(self.data) + len(str(self.headers))


@dataclass(slots=True)
class Pull:
    """A client that waits for messages."""

    batch: int
    send: Callable[[Stored, str], None]
    """Sends one message, with the subject by which it is settled."""
    alive: Callable[[], bool]
    end: Callable[[], None]
    """Says that no more comes: nats-py asks for what there is, or for the first that comes."""
    sent: int = 0


@dataclass(slots=True)
class _Pending:
    due_s: float
    delivered: int


@cache
def matches(subject: str, pattern: str) -> bool:
    """Whether a subject falls under a filter."""
    if pattern == subject:
        return True
    given, wanted = subject.split("."), pattern.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        return len(given) > len(wanted) and all(
            w in ("*", g) for g, w in zip(given, wanted, strict=False)
        )
    return len(given) == len(wanted) and all(
        w in ("*", g) for g, w in zip(given, wanted, strict=True)
    )


class Consumer:
    """A durable pull consumer."""

    def __init__(self, server: Server, config: api.ConsumerConfig) -> None:
        self._server = server
        self.config = config
        self.name = config.durable_name or ""
        self._next = config.opt_start_seq or 1
        self._ordinal = 0
        self._acked = self._next - 1
        self._delivered = 0
        self._pending: dict[int, _Pending] = {}
        self._counts: dict[int, int] = {}
        self._again: deque[int] = deque()
        self._pulls: deque[Pull] = deque()
        self._timer_s = float("inf")
        self._filters: str | list[str] = []
        self._wanted: dict[str, bool] = {}
        """By subject, as these filters have it: every look at what lies ahead asks."""
        self.gone = False

    @property
    def _acks(self) -> bool:
        return self.config.ack_policy != api.AckPolicy.NONE

    def wants(self, subject: str) -> bool:
        """Whether a subject is one of its own."""
        filters = self.config.filter_subjects or self.config.filter_subject or ">"
        if filters is not self._filters:
            self._filters, self._wanted = filters, {}
        known = self._wanted.get(subject)
        if known is None:
            several = [filters] if isinstance(filters, str) else filters
            known = any(matches(subject, pattern) for pattern in several)
            self._wanted[subject] = known
        return known

    def _ahead(self) -> Iterator[Stored]:
        server = self._server
        for sequence in range(self._next, server.last + 1):
            stored = server.messages.get(sequence)
            if stored is not None and self.wants(stored.subject):
                yield stored

    def pull(self, pull: Pull) -> None:
        """Somebody asks for messages."""
        self._pulls.append(pull)
        self.deliver()

    def deliver(self) -> None:
        """Send what there is to those who wait."""
        while self._pulls and not self.gone:
            pull = self._pulls[0]
            if not pull.alive():
                self._pulls.popleft()
                continue
            stored = self._one()
            if stored is None:
                if pull.sent:
                    self._pulls.popleft()
                    pull.end()
                return
            self._ordinal += 1
            count = self._counts[stored.sequence] = self._counts.get(stored.sequence, 0) + 1
            self._delivered = max(self._delivered, stored.sequence)
            if self._acks:
                due_s = self._server.loop.time() + (self.config.ack_wait or 30.0)
                self._pending[stored.sequence] = _Pending(due_s, count)
                self._wake_at(due_s)
            reply = (
                f"$JS.ACK.{subjects.STREAM}.{self.name}.{count}.{stored.sequence}"
                f".{self._ordinal}.{stored.time_ns}.0"
            )
            pull.send(stored, reply)
            pull.sent += 1
            if pull.sent == pull.batch:
                self._pulls.popleft()
                pull.end()

    def _one(self) -> Stored | None:
        while self._again:
            stored = self._server.messages.get(self._again.popleft())
            if stored is not None:
                return stored
        if self._acks and len(self._pending) >= (self.config.max_ack_pending or 1000):
            return None
        stored = next(self._ahead(), None)
        if stored is not None:
            self._next = stored.sequence + 1
        return stored

    def settle(self, sequence: int, how: str, delay_s: float) -> None:
        """An acknowledgement of some kind came in."""
        if how == "ack" and self.config.ack_policy == api.AckPolicy.ALL:
            for one in [n for n in self._pending if n <= sequence]:
                del self._pending[one]
        elif how in ("ack", "term"):
            self._pending.pop(sequence, None)
        elif sequence in self._pending:
            wait_s = delay_s if how == "nak" else (self.config.ack_wait or 30.0)
            due_s = self._server.loop.time() + wait_s
            self._pending[sequence].due_s = due_s
            self._wake_at(due_s)
        self.deliver()

    def _wake_at(self, due_s: float) -> None:
        loop = self._server.loop
        if due_s < self._timer_s:
            self._timer_s = due_s
            loop.later(due_s - loop.time(), self._look)

    def _look(self) -> None:
        now_s = self._server.loop.time()
        self._timer_s = float("inf")
        for sequence, pending in sorted(self._pending.items()):
            if pending.due_s <= now_s + 1e-9:
                # It stays pending, with no time of its own until it is delivered again.
                pending.due_s = float("inf")
                self._again.append(sequence)
        waiting = [p.due_s for p in self._pending.values() if p.due_s < float("inf")]
        if waiting and not self.gone:
            self._wake_at(min(waiting))
        self.deliver()

    def info(self) -> api.ConsumerInfo:
        """Where it stands."""
        floor = min(self._pending) - 1 if self._pending else self._delivered
        self._acked = max(self._acked, floor)
        return api.ConsumerInfo(
            name=self.name,
            stream_name=subjects.STREAM,
            config=self.config,
            created=START,
            num_pending=sum(1 for _ in self._ahead()),
            num_ack_pending=len(self._pending),
            ack_floor=api.SequenceInfo(consumer_seq=0, stream_seq=floor if self._delivered else 0),
            delivered=api.SequenceInfo(consumer_seq=self._ordinal, stream_seq=self._delivered),
        )
