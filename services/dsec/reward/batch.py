"""One tick's rows in, one tick's rewards out: columns all the way, no model per row. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from uuid import UUID

import numpy as np

from dsec.reward.fact import env_body, facts_of_bodies
from dsec.reward.frames import Failure, Outcome, Task
from dsec_contracts import RewardDeferred, RewardMissing, RewardScored, SessionStepped
from dsec_contracts.columns import BASE64_GROWTH, PAYLOAD_SHARE_MAX, VarColumn, fixed_rows
from dsec_contracts.reward import (
    CAUSE_BYTES,
    RewardCircumstance,
    RewardColumns,
    RewardMissingCircumstance,
    RewardNoticeCircumstance,
    RewardNoticeFact,
)

REVISION = 1
ROW_OVERHEAD_BYTES = 56
"""A scored row beside its fact: id, step, revision, value, cause, offset."""
OFFSET_BYTES = 4


@dataclass(frozen=True)
class Batch:
    """The rows of one `session.stepped` message, and which revision their rewards are."""

    event: SessionStepped
    revision: int = REVISION

    @cached_property
    def sessions(self) -> list[bytes]:
        """16 bytes each."""
        return fixed_rows(self.event.row.session_id, 16)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The step of each row."""
        return struct.unpack(f"<{self.event.rows}i", self.event.row.step)

    @cached_property
    def specs(self) -> list[str]:
        """The hash of each row's reward spec; empty where the message names none."""
        named = self.event.circumstance.reward_specs
        most = named.get("", "")
        if len(named) <= 1 and most:
            return [most] * self.event.rows
        return [named.get(session.hex(), most) for session in self.sessions]

    @cached_property
    def causes(self) -> bytes:
        """16 bytes each: the head of the chain."""
        chains = np.frombuffer(self.event.row.chain, "u1").reshape(-1, 32)
        return chains[:, :CAUSE_BYTES].tobytes()

    def env_outcomes(self) -> list[Outcome]:
        """Every row's outcome if all were rewarded by their environments."""
        return [env_body(raw) for raw in fixed_rows(self.event.row.env_reward, 8)]

    def tasks(self, rows: Sequence[int]) -> list[Task]:
        """What a function is given, for some rows."""
        row, specs = self.event.row, self.specs
        facts, before, after = (_some(c, rows) for c in (row.fact, row.prior, row.observation))
        return list(map(Task, [specs[n] for n in rows], facts, before, after))

    def scored(
        self,
        outcomes: Sequence[Outcome | None],
        replica: str,
        message_bytes_max: int,
        responses: Mapping[int, bytes] | None = None,
    ) -> Iterator[RewardScored]:
        """The rewards of all rows that have one, in as many messages as the size needs.

        Args:
            responses: what services answered, as it is recorded, by row.
        """
        told = responses or {}
        steps: Sequence[int] = self.steps
        causes = fixed_rows(self.causes, CAUSE_BYTES)
        bodies = [outcome for outcome in outcomes if type(outcome) is bytes]
        rows: Sequence[int] = range(len(outcomes))
        if len(bodies) != len(rows):
            rows = [n for n in rows if type(outcomes[n]) is bytes]
            steps, causes = [steps[n] for n in rows], [causes[n] for n in rows]
        facts = facts_of_bodies(steps, self.revision, bodies, causes)
        answers = [told.get(n, b"") for n in rows] if told else []
        for start, stop in _portions(facts, message_bytes_max, answers):
            part = slice(start, stop)
            yield self._scored(rows[part], bodies[part], facts[part], answers[part], replica)

    def _scored(
        self,
        rows: Sequence[int],
        bodies: list[bytes],
        facts: list[bytes],
        answers: list[bytes],
        replica: str,
    ) -> RewardScored:
        row, n = self.event.row, len(rows)
        session_id, step, causes = row.session_id, row.step, self.causes
        if n != self.event.rows:
            session_id, step, causes = (
                np.frombuffer(column, f"V{width}")[list(rows)].tobytes()
                for column, width in ((session_id, 16), (step, 4), (causes, CAUSE_BYTES))
            )
        # A body starts with the value, big-endian behind one byte.
        values = np.frombuffer(b"".join([body[1:9] for body in bodies]), ">f8")
        columns = RewardColumns.model_construct(
            session_id=session_id,
            step=step,
            revision=struct.pack("<i", self.revision) * n,
            value=values.astype("<f8").tobytes(),
            cause=causes,
            fact=VarColumn.pack(facts),
            responses=VarColumn.pack(answers) if any(answers) else None,
        )
        circumstance = RewardCircumstance.model_construct(
            replica=replica, lane=self.event.circumstance.lane
        )
        return RewardScored.model_construct(rows=n, row=columns, circumstance=circumstance)

    def missing(
        self, outcomes: Sequence[Outcome | None], responses: Mapping[int, bytes] | None = None
    ) -> Iterator[RewardMissing]:
        """A notice for each row that has no reward and will have none.

        Args:
            responses: what services answered, as it is recorded, by row.
        """
        answers = responses or {}
        for n, outcome in enumerate(outcomes):
            if isinstance(outcome, Failure):
                fact = self._notice(n, outcome.code, fatal=outcome.fatal)
                told = RewardMissingCircumstance(
                    message=outcome.message,
                    lane=self.event.circumstance.lane,
                    responses=answers.get(n) or None,
                )
                yield RewardMissing(fact=fact, circumstance=told)

    def deferred(self, rows: Sequence[int]) -> Iterator[RewardDeferred]:
        """A notice for each of some rows, whose rewards come later."""
        for n in rows:
            fact = self._notice(n, "service_slow", fatal=False)
            told = RewardNoticeCircumstance(lane=self.event.circumstance.lane)
            yield RewardDeferred(fact=fact, circumstance=told)

    def _notice(self, n: int, code: str, *, fatal: bool) -> RewardNoticeFact:
        return RewardNoticeFact(
            session_id=UUID(bytes=self.sessions[n]),
            step=self.steps[n],
            code=code,
            fatal=fatal,
            cause=self.causes[n * CAUSE_BYTES : (n + 1) * CAUSE_BYTES],
        )

    @cached_property
    def deferrable(self) -> frozenset[str]:
        """The sessions, in hexadecimal, that take a reward later."""
        # A lane that knows nothing of it does not say so, and then none does.
        return frozenset(getattr(self.event.circumstance, "deferrable", None) or ())

    @cached_property
    def closing(self) -> dict[int, int]:
        """The rows that close an episode which is rewarded as a whole, each with its first step."""
        told = getattr(self.event.circumstance, "closing", None) or {}
        firsts = (
            {n: told.get(session.hex()) for n, session in enumerate(self.sessions)} if told else {}
        )
        # An episode that begins behind its end is another one of the session: a worker of an
        # earlier version published both at once. It asks again for what it does not hear.
        return {n: f for n, f in firsts.items() if f is not None and f <= self.steps[n]}

    def name(self, n: int) -> tuple[bytes, int, bytes]:
        """Session, step and cause of a row: the same in every message that asks for its reward."""
        cause = self.causes[n * CAUSE_BYTES : (n + 1) * CAUSE_BYTES]
        return self.sessions[n], self.steps[n], cause


def _some(column: VarColumn, rows: Sequence[int]) -> list[bytes]:
    unpacked = column.unpack()
    return unpacked if len(rows) == len(unpacked) else [unpacked[n] for n in rows]


def _portions(
    facts: Sequence[bytes], message_bytes_max: int, answers: Sequence[bytes]
) -> Iterator[tuple[int, int]]:
    """Where to cut so that every message fits. The same facts are always cut the same."""
    room = int(message_bytes_max * PAYLOAD_SHARE_MAX / BASE64_GROWTH)
    whole = sum(map(len, facts)) + sum(map(len, answers)) + len(facts) * ROW_OVERHEAD_BYTES
    if facts and whole <= room:
        yield 0, len(facts)
        return
    sizes = [len(fact) + ROW_OVERHEAD_BYTES for fact in facts]
    for n, answer in enumerate(answers):
        sizes[n] += len(answer) + OFFSET_BYTES
    ends = list(accumulate(sizes, initial=0))
    start = 0
    for stop in range(1, len(facts) + 1):
        if stop == len(facts) or ends[stop + 1] - ends[start] > room:
            yield start, stop
            start = stop
