"""A simulated JetStream server: one stream, its durable consumers, and a bucket with leases.

What is modelled is what the services build on, as nats-server 2.11 and later do it: sequences, the
last sequence of a subject and publishes that expect one (of another subject, too), the window in
which a message id is known, limits with `discard: new`, purges by subject after which a subject's
sequence is forgotten, pull consumers with their own numbering, acknowledgement of one or of all,
redelivery after `ack_wait` or a delay, `max_ack_pending`, and floors. Calls here are instantaneous;
the network is in `network.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import nats.js.errors
from nats.js import api
from tests.simulation.clock import START, START_NS, VirtualLoop
from tests.simulation.switches import Switches

from dsec_contracts import subjects

MAX_PAYLOAD_BYTES = 1 << 20
_WRONG_LAST = (400, 10071, "wrong last sequence")
_FULL = (503, 10077, "maximum bytes exceeded")
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
        self.gone = False

    @property
    def _acks(self) -> bool:
        return self.config.ack_policy != api.AckPolicy.NONE

    def wants(self, subject: str) -> bool:
        """Whether a subject is one of its own."""
        return any(matches(subject, pattern) for pattern in self.config.filter_subjects or [])

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


@dataclass(slots=True)
class Server:
    """The server and its one stream."""

    loop: VirtualLoop
    switches: Switches
    duplicate_window_s: float = 120.0
    max_bytes: int = 1 << 30
    messages: dict[int, Stored] = field(default_factory=dict)
    archive: list[Stored] = field(default_factory=list)
    """All that was ever acknowledged, what was purged included."""
    last: int = 0
    bytes: int = 0
    consumers: dict[str, Consumer] = field(default_factory=dict)
    leases: dict[str, tuple[int, bytes, float]] = field(default_factory=dict)
    away: bool = False
    refusing: bool = False
    """Whether the stream is said to be full, whatever it holds."""
    _by_subject: dict[str, list[int]] = field(default_factory=dict)
    _ids: dict[str, tuple[int, float]] = field(default_factory=dict)
    _revision: int = 0

    def publish(self, subject: str, headers: dict[str, str], data: bytes) -> tuple[int, bool]:
        """Store a message. Returns its sequence, and whether it was there already.

        Raises:
            APIError: the stream would not have it.
        """
        now_s = self.loop.time()
        message_id = headers.get("Nats-Msg-Id")
        known = self._ids.get(message_id) if message_id is not None else None
        if known is not None and now_s - known[1] < self.duplicate_window_s:
            return known[0], True
        self._check_expected(subject, headers)
        stored = Stored(self.last + 1, subject, headers, data, self.loop.now_ns)
        if self.refusing or self.bytes + stored.size > self.max_bytes:
            raise _error(*_FULL)
        self.last += 1
        self.messages[self.last] = stored
        self.archive.append(stored)
        self.bytes += stored.size
        self._by_subject.setdefault(subject, []).append(self.last)
        if message_id is not None:
            self._ids[message_id] = (self.last, now_s)
        for consumer in list(self.consumers.values()):
            if consumer.wants(subject):
                consumer.deliver()
        return self.last, False

    def _check_expected(self, subject: str, headers: dict[str, str]) -> None:
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        if expected is None:
            return
        of = headers.get("Nats-Expected-Last-Subject-Sequence-Subject")
        if of is not None and not self.switches.fence:
            return
        if of is None and not self.switches.expected_sequence:
            return
        if self.last_of(of or subject) != int(expected):
            raise _error(*_WRONG_LAST)

    def last_of(self, subject: str) -> int:
        """The last sequence of a subject; 0: there is none any more."""
        found = self._by_subject.get(subject)
        return found[-1] if found else 0

    def purge(self, pattern: str, before: int) -> None:
        """Remove what lies before a sequence."""
        for sequence in [n for n in self.messages if n < before]:
            stored = self.messages[sequence]
            if matches(stored.subject, pattern):
                del self.messages[sequence]
                self._by_subject[stored.subject].remove(sequence)
                self.bytes -= stored.size

    def state(self) -> dict[str, Any]:
        """What `$JS.API.STREAM.INFO` says."""
        first = min(self.messages, default=self.last + 1)
        return {
            "config": {"max_bytes": self.max_bytes},
            "created": "2025-12-31T23:59:59.000000+00:00",
            "state": {
                "first_seq": first,
                "last_seq": self.last,
                "messages": len(self.messages),
                "bytes": self.bytes,
            },
        }

    # -- consumers -----------------------------------------------------------------------------

    def consumer(self, name: str) -> Consumer:
        """A durable.

        Raises:
            NotFoundError: there is none.
        """
        found = self.consumers.get(name)
        if found is None:
            raise nats.js.errors.NotFoundError(404, "consumer not found", 10014)
        return found

    def add_consumer(self, config: api.ConsumerConfig) -> None:
        """Make a durable, or change one."""
        name = config.durable_name or ""
        if name in self.consumers:
            self.consumers[name].config = config
        else:
            self.consumers[name] = Consumer(self, config)

    def delete_consumer(self, name: str) -> None:
        """Remove a durable. Whoever waits at it waits in vain.

        Raises:
            NotFoundError: there is none.
        """
        self.consumer(name).gone = True
        del self.consumers[name]

    # -- leases --------------------------------------------------------------------------------

    def lease(self, bucket: str, holder: bytes, last: int, ttl_s: float) -> int:
        """Write the one key of a bucket, if its revision is still `last` (0: there is none).

        Raises:
            KeyWrongLastSequenceError: it is another's.
        """
        now_s = self.loop.time()
        found = self.leases.get(bucket)
        current = found[0] if found is not None and found[2] > now_s else 0
        if current != last:
            raise nats.js.errors.KeyWrongLastSequenceError(f"wrong last sequence: {current}")
        self._revision += 1
        self.leases[bucket] = (self._revision, holder, now_s + ttl_s)
        return self._revision

    def free(self, bucket: str, last: int) -> None:
        """Delete the one key of a bucket, if its revision is still `last`."""
        if bucket in self.leases and self.leases[bucket][0] == last:
            del self.leases[bucket]

    def time_of(self, stored: Stored) -> float:
        """When a message came in, in seconds of the run."""
        return (stored.time_ns - START_NS) / 1e9


def _error(code: int, err_code: int, description: str) -> Exception:
    try:
        nats.js.errors.APIError.from_error(
            {"code": code, "err_code": err_code, "description": description}
        )
    except nats.js.errors.APIError as error:
        return error
    raise AssertionError("unreachable")
