"""Rows to columns and back: what a tick publishes, and what a lane hears."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from dsec.session.io import Input, Stepped, missing_input, reward_input
from dsec_contracts import Event, RewardMissing, RewardScored, SessionStepped
from dsec_contracts.columns import VarColumn, fixed_rows
from dsec_contracts.step import StepCircumstance, StepColumns

ROW_OVERHEAD_BYTES = 250
"""Fixed columns, offsets, the cause and, at worst, a reward spec of its own."""
BASE64_GROWTH = 1.35
PAYLOAD_SHARE_MAX = 0.9


@dataclass(slots=True)
class Row:
    """One session's step, with what the columns carry beside it."""

    session_id: bytes
    attempt: int
    stepped: Stepped
    observation: bytes
    prior: bytes
    reset_observation: bytes
    policy: bytes
    reward_spec: str

    def size_bytes(self) -> int:
        """About how many bytes the row takes in a message."""
        stepped = self.stepped
        return int(
            BASE64_GROWTH
            * (
                ROW_OVERHEAD_BYTES
                + len(stepped.fact)
                + len(self.observation)
                + len(self.prior)
                + len(self.reset_observation)
                + len(stepped.extras)
                + len(self.policy)
            )
        )


def split(rows: Sequence[Row], max_payload_bytes: int) -> Iterator[Sequence[Row]]:
    """Rows in portions that fit a message."""
    room = int(max_payload_bytes * PAYLOAD_SHARE_MAX)
    start, used = 0, 0
    for n, row in enumerate(rows):
        size = row.size_bytes()
        if used + size > room and n > start:
            yield rows[start:n]
            start, used = n, 0
        used += size
    if start < len(rows):
        yield rows[start:]


def pack(rows: Sequence[Row], worker: str, lane: str, tick: int) -> SessionStepped:
    """One message of a tick. Built without validation: every column comes from `rows`."""
    n = len(rows)
    steps = [row.stepped for row in rows]
    var = VarColumn.pack
    columns = StepColumns.model_construct(
        session_id=b"".join([row.session_id for row in rows]),
        attempt=struct.pack(f"<{n}i", *[row.attempt for row in rows]),
        step=struct.pack(f"<{n}i", *[s.step for s in steps]),
        episode=struct.pack(f"<{n}i", *[s.episode for s in steps]),
        env_reward=struct.pack(f"<{n}d", *[s.env_reward for s in steps]),
        terminated=bytes([s.terminated for s in steps]),
        truncated=bytes([s.truncated for s in steps]),
        chain=b"".join([s.chain for s in steps]),
        fact=var([s.fact for s in steps]),
        cause=var([s.cause.encode() for s in steps]),
        observation=var([row.observation for row in rows]),
        prior=var([row.prior for row in rows]),
        reset_observation=var([row.reset_observation for row in rows]),
        extras=var([s.extras for s in steps]),
        policy=var([row.policy for row in rows]),
    )
    circumstance = StepCircumstance.model_construct(
        worker=worker,
        lane=lane,
        tick=tick,
        reward_specs=_reward_specs(rows),
    )
    return SessionStepped.model_construct(rows=n, row=columns, circumstance=circumstance)


def _reward_specs(rows: Sequence[Row]) -> dict[str, str]:
    """The reward specs of a tick: one for all under the empty key, the others by session."""
    usual = rows[0].reward_spec
    return {"": usual} | {
        row.session_id.hex(): row.reward_spec for row in rows if row.reward_spec != usual
    }


def heard(event: Event) -> Iterator[tuple[bytes, Input]]:
    """The inputs of a reply, each with the bytes of its session's id."""
    if isinstance(event, RewardScored):
        row, n = event.row, event.rows
        yield from zip(
            fixed_rows(row.session_id, 16),
            map(
                reward_input,
                struct.unpack(f"<{n}i", row.step),
                struct.unpack(f"<{n}d", row.value),
                row.fact.unpack(),
                fixed_rows(row.cause, 16),
            ),
            strict=True,
        )
    elif isinstance(event, RewardMissing):
        fact, told = event.fact, event.circumstance
        session_id: UUID = fact.session_id
        yield (
            session_id.bytes,
            missing_input(fact.step, fact.code, fact.fatal, told.message, fact.cause),
        )
