"""Rows to columns and back: what a tick publishes, and what a lane hears."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple
from uuid import UUID

from dsec.session.io import (
    Input,
    Stepped,
    deferred_input,
    failure_content,
    missing_input,
    result_input,
    reward_input,
)
from dsec.session.stored_results import StoredResult
from dsec_contracts import (
    Event,
    RewardDeferred,
    RewardMissing,
    RewardScored,
    SessionStepped,
    ToolFailed,
    ToolReturned,
    keys,
)
from dsec_contracts.columns import BASE64_GROWTH, PAYLOAD_SHARE_MAX, VarColumn, fixed_rows
from dsec_contracts.step import StepCircumstance, StepColumns

ROW_OVERHEAD_BYTES = 250
"""Fixed columns, offsets, the cause and, at worst, a reward spec of its own."""


class Sender(NamedTuple):
    """What the columns say of a session beside its step; the same for all its steps."""

    session_id: bytes
    attempt: int
    policy: bytes
    reward_spec: str
    deferrable: bool = False
    """Whether its rewards may be deferred."""


Row = tuple[Sender, Stepped]


def size_bytes(row: Row) -> int:
    """About how many bytes a row takes in a message."""
    sender, stepped = row
    variable = (
        len(sender.policy)
        + len(stepped.fact)
        + len(stepped.observation)
        + len(stepped.prior)
        + len(stepped.reset_observation)
        + len(stepped.extras)
    )
    return int(BASE64_GROWTH * (ROW_OVERHEAD_BYTES + variable))


def split(rows: Sequence[Row], max_payload_bytes: int) -> Iterator[Sequence[Row]]:
    """Rows in portions that fit a message. None of them closes two episodes of one session, as
    steps that are published again may: a message says of a session where its episode began."""
    room = int(max_payload_bytes * PAYLOAD_SHARE_MAX)
    start, used, closing = 0, 0, set[bytes]()
    for n, (row, size) in enumerate(zip(rows, map(size_bytes, rows), strict=True)):
        sender, stepped = row
        if n > start and (used + size > room or sender.session_id in closing):
            yield rows[start:n]
            start, used = n, 0
            closing.clear()
        used += size
        if stepped.closes_from is not None:
            closing.add(sender.session_id)
    if start < len(rows):
        yield rows[start:]


def pack(rows: Sequence[Row], worker: str, lane: str, tick: int) -> SessionStepped:
    """One message of a tick. Built without validation: every column comes from `rows`."""
    n = len(rows)
    senders, stepped = zip(*rows, strict=True)
    # Rows to columns without a Python loop, in the order of the tuples' fields.
    session_ids, attempts, policies, specs, deferrable = zip(*senders, strict=True)
    (
        steps,
        episodes,
        env_rewards,
        terminated,
        truncated,
        chains,
        facts,
        causes,
        observations,
        priors,
        reset_observations,
        extras,
        _,  # tool calls are an event of their own
        closes_from,
    ) = zip(*stepped, strict=True)
    var = VarColumn.pack
    columns = StepColumns.model_construct(
        session_id=b"".join(session_ids),
        attempt=struct.pack(f"<{n}i", *attempts),
        step=struct.pack(f"<{n}i", *steps),
        episode=struct.pack(f"<{n}i", *episodes),
        env_reward=struct.pack(f"<{n}d", *env_rewards),
        terminated=bytes(terminated),
        truncated=bytes(truncated),
        chain=b"".join(chains),
        fact=var(facts),
        cause=var(causes),
        observation=var(observations),
        prior=var(priors),
        reset_observation=var(reset_observations),
        extras=var(extras),
        policy=var(policies),
    )
    circumstance = StepCircumstance.model_construct(
        worker=worker,
        lane=lane,
        tick=tick,
        reward_specs=_reward_specs(session_ids, specs),
        deferrable=[raw_id.hex() for raw_id in compress(session_ids, deferrable)],
        closing={
            raw_id.hex(): first
            for raw_id, first in zip(session_ids, closes_from, strict=True)
            if first is not None
        },
    )
    return SessionStepped.model_construct(rows=n, row=columns, circumstance=circumstance)


def _reward_specs(session_ids: Sequence[bytes], specs: Sequence[str]) -> dict[str, str]:
    """The reward specs of a tick: one for all under the empty key, the others by session."""
    usual = specs[0]
    if specs.count(usual) == len(specs):
        return {"": usual}
    pairs = zip(session_ids, specs, strict=True)
    return {"": usual} | {raw_id.hex(): spec for raw_id, spec in pairs if spec != usual}


def heard(event: Event) -> Iterator[tuple[bytes, Input | StoredResult]]:
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
    elif isinstance(event, RewardDeferred):
        notice = event.fact
        yield notice.session_id.bytes, deferred_input(notice.step, notice.code, notice.cause)
    elif isinstance(event, (ToolReturned, ToolFailed)):
        yield event.fact.session_id.bytes, _result(event)


def _result(event: ToolReturned | ToolFailed) -> Input | StoredResult:
    fact = event.fact
    ordinal = keys.call_ordinal(fact.step, fact.turn, fact.index)
    if isinstance(event, ToolReturned):
        if event.fact.blob is not None:
            return StoredResult(ordinal, event.fact.blob, fact.turn_hash)
        return result_input(ordinal, "", event.fact.content, fact.turn_hash)
    failed = event.fact
    content = failure_content(failed.message, failed.retryable)
    return result_input(ordinal, failed.code, content, failed.turn_hash)
