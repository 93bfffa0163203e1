"""A simulated JetStream server: one stream, its durable consumers, and buckets of values.

What is modelled is what the services build on, as nats-server 2.11 and later do it: sequences, the
last sequence of a subject and publishes that expect one (of another subject, too), the window in
which a message id is known, limits with `discard: new`, purges by subject after which a subject's
sequence is forgotten, pull consumers with their own numbering, acknowledgement of one or of all,
redelivery after `ack_wait` or a delay, `max_ack_pending`, and floors. Calls here are instantaneous;
the network is in `network.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import nats.js.errors
from nats.js import api
from tests.simulation.clock import START_NS, VirtualLoop
from tests.simulation.consumers import Consumer, Stored, matches
from tests.simulation.switches import Switches

_WRONG_LAST = (400, 10071, "wrong last sequence")
_FULL = (503, 10077, "maximum bytes exceeded")


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
    stored_bytes: int = 0
    consumers: dict[str, Consumer] = field(default_factory=dict)
    values: dict[tuple[str, str], tuple[int, bytes, float]] = field(default_factory=dict)
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
        if self.refusing or self.stored_bytes + stored.size > self.max_bytes:
            raise _error(*_FULL)
        self.last += 1
        self.messages[self.last] = stored
        self.archive.append(stored)
        self.stored_bytes += stored.size
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
        """The last sequence of a subject, or of a filter; 0: there is none any more."""
        if subject.endswith(">"):
            return max(
                (n for n, m in self.messages.items() if matches(m.subject, subject)), default=0
            )
        found = self._by_subject.get(subject)
        return found[-1] if found else 0

    def purge(self, pattern: str, before: int) -> None:
        """Remove what lies before a sequence."""
        for sequence in [n for n in self.messages if n < before]:
            stored = self.messages[sequence]
            if matches(stored.subject, pattern):
                del self.messages[sequence]
                self._by_subject[stored.subject].remove(sequence)
                self.stored_bytes -= stored.size

    def state(self) -> dict[str, Any]:
        """What `$JS.API.STREAM.INFO` says."""
        first = min(self.messages, default=self.last + 1)
        return {
            "config": {"max_bytes": self.max_bytes, "num_replicas": 1},
            "created": "2025-12-31T23:59:59.000000+00:00",
            "state": {
                "first_seq": first,
                "last_seq": self.last,
                "messages": len(self.messages),
                "bytes": self.stored_bytes,
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

    # -- buckets -------------------------------------------------------------------------------

    def value(self, bucket: str, key: str) -> tuple[int, bytes]:
        """Revision and value of a key.

        Raises:
            KeyNotFoundError: it has none, or not any more.
        """
        found = self.values.get((bucket, key))
        if found is None or found[2] <= self.loop.time():
            raise nats.js.errors.KeyNotFoundError
        return found[:2]

    def change(self, bucket: str, key: str, value: bytes, last: int, ttl_s: float) -> int:
        """Write a key, if its revision is still `last` (0: there is none).

        Args:
            ttl_s: how long it stays; 0: for ever.

        Raises:
            KeyWrongLastSequenceError: somebody else has changed it.
        """
        now_s = self.loop.time()
        found = self.values.get((bucket, key))
        current = found[0] if found is not None and found[2] > now_s else 0
        if current != last:
            raise nats.js.errors.KeyWrongLastSequenceError(f"wrong last sequence: {current}")
        self._revision += 1
        until_s = now_s + ttl_s if ttl_s else math.inf
        self.values[bucket, key] = (self._revision, value, until_s)
        return self._revision

    def free(self, bucket: str, key: str, last: int) -> None:
        """Delete a key, if its revision is still `last`."""
        if (bucket, key) in self.values and self.values[bucket, key][0] == last:
            del self.values[bucket, key]

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
