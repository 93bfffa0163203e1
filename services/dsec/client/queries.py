"""What the client and the command line ask the log, in SQL over its views. Reads, never writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from dsec.platform.engine import async_engine
from dsec.platform.log import Position
from dsec_contracts.keys import SYSTEM_SESSION, session_time

ENDED = ("completed", "failed", "cancelled")
FINAL = (*ENDED, "rejected")


@dataclass(frozen=True, slots=True)
class Summary:
    """One session as the log shows it. `chain_hash` is in hexadecimal, empty before the start;
    `reward_total` is None while no reward has come."""

    session_id: UUID
    status: str
    code: str | None
    steps: int
    reward_total: float | None
    chain_hash: str
    attempts: int
    seed: int | None = None
    group_id: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    episodes: int = 0
    rewards_missing: int = 0
    specs: dict[str, str | None] = field(default_factory=dict)
    policy: str | None = None

    @property
    def final(self) -> bool:
        """Whether the session is over."""
        return self.status in FINAL

    def as_json(self) -> dict[str, Any]:
        """The documented keys, and what else is known."""
        return {
            "session_id": str(self.session_id),
            "status": self.status,
            "code": self.code,
            "steps": self.steps,
            "reward_total": self.reward_total,
            "chain_hash": self.chain_hash,
            "attempts": self.attempts,
            "seed": self.seed,
            "group_id": self.group_id,
            "labels": self.labels,
            "episodes": self.episodes,
            "rewards_missing": self.rewards_missing,
            "specs": self.specs,
            "policy": self.policy,
        }


_SUMMARY = """
select session_id, status, code, steps, reward_total, chain_hash, attempts, seed, group_id, labels,
       episodes, rewards_missing, agent_spec, env_spec, reward_fn_hash, policy
from session_summary
"""
_REQUESTED = "select session_id from event_log where kind = 'session.requested' and step is null"
_BY = """(epoch, sequence) <= (
    select coalesce(cast(:epoch as integer), epoch), coalesce(cast(:sequence as bigint), sequence)
    from log_floor order by log_floor.epoch desc limit 1)"""
AT = "session_id = any(:ids) and session_at between :first and :last"
"""Some sessions, wherever a query has `at_parameters`."""


class Queries:
    """Questions to one log."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @classmethod
    def connect(cls, database_url: str) -> Self:
        """Connections are made when they are first needed."""
        return cls(async_engine(database_url))

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    async def rows(self, statement: str, **values: Any) -> list[Any]:
        """The rows of one statement, in a transaction of its own."""
        async with self._engine.connect() as connection:
            return list(await connection.execute(text(statement), values))

    async def ended(self, ids: Sequence[UUID], as_of: Position | None = None) -> set[UUID]:
        """Which of these sessions are over, at a position or the log's floor; cheap, for
        polling."""
        if not ids:
            return set()
        rows = await self.rows(
            f"select session_id from event_log where {AT} and key = 'ended' and {_BY}",
            **at_parameters(ids),
            **_by(as_of),
        )
        return {row.session_id for row in rows}

    async def rejections(
        self, ids: Sequence[UUID], as_of: Position | None = None
    ) -> dict[UUID, tuple[str, str]]:
        """Code and message of those requests that were refused, at a position or the floor."""
        if not ids:
            return {}
        events = [request_event_id(i) for i in ids]
        rows = await self.rows(
            f"""
            select r.session_id, r.code, r.message from rejection r
            where r.session_id = any(:ids) and r.event_id = any(:events)
              and exists (
                select from event_log where session_id = :system and session_at = :system_at
                  and key = 'rejected:' || r.event_id and {_BY})
            """,
            ids=[str(i) for i in ids],
            events=events,
            system=SYSTEM_SESSION,
            system_at=session_time(SYSTEM_SESSION),
            **_by(as_of),
        )
        return {UUID(row.session_id): (row.code, row.message or "") for row in rows}

    async def summaries(self, ids: Sequence[UUID]) -> list[Summary]:
        """Summaries in the order of `ids`; sessions the log does not know yet are `unknown`."""
        if not ids:
            return []
        rows = await self.rows(f"{_SUMMARY} where {AT}", **at_parameters(ids))
        found = {row.session_id: _summary(row) for row in rows}
        return [found.get(i) or Summary(i, "unknown", None, 0, None, "", 0) for i in ids]

    async def recent(
        self,
        *,
        limit: int,
        status: str | None = None,
        group_id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[Summary]:
        """The latest sessions with all of this, the newest first."""
        labelled, values = _labelled("labels", labels or {})
        rows = await self.rows(
            f"""{_SUMMARY}
            where (cast(:status as text) is null or status = :status)
              and (cast(:group_id as text) is null or group_id = :group_id)
              {labelled}
            order by session_id desc limit :limit""",
            status=status,
            group_id=group_id,
            limit=limit,
            **values,
        )
        return [_summary(row) for row in rows]

    async def selected(
        self, *, group_id: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[UUID]:
        """All requested sessions of a group and with these labels, the oldest first; of None, all
        there are."""
        labelled, values = _labelled("fact_json->'labels'", labels or {})
        rows = await self.rows(
            f"""{_REQUESTED}
            and (cast(:group_id as text) is null or fact_json->>'group_id' = :group_id)
            {labelled} order by session_id""",
            group_id=group_id,
            **values,
        )
        return [row.session_id for row in rows]

    async def beginning(self, head: str, limit: int) -> list[UUID]:
        """Session ids that begin with `head` (hexadecimal digits and hyphens), newest first."""
        rows = await self.rows(
            f"{_REQUESTED} and session_id between cast(:low as uuid) and cast(:high as uuid)"
            " order by session_id desc limit :limit",
            low=_filled(head, "0"),
            high=_filled(head, "f"),
            limit=limit,
        )
        return [row.session_id for row in rows]

    async def ending(self, tail: str, limit: int) -> list[UUID]:
        """Session ids that end with `tail`, newest first. Looks at all sessions."""
        rows = await self.rows(
            f"{_REQUESTED} and replace(cast(session_id as text), '-', '') like :pattern"
            " order by session_id desc limit :limit",
            pattern="%" + tail.replace("-", "").lower(),
            limit=limit,
        )
        return [row.session_id for row in rows]

    async def messages(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """What is recorded about why sessions ended or were refused; only where there is any."""
        if not ids:
            return {}
        rows = await self.rows(
            f"""
            select session_id,
              cast(replace(cast(circumstance as text), '\\u0000', '') as json)->>'message'
                as message
            from event_log where {AT} and key = 'ended'
            """,
            **at_parameters(ids),
        )
        refused = await self.rejections(ids)
        told = {i: message for i, (_, message) in refused.items()}
        told |= {row.session_id: row.message for row in rows}
        return {i: message for i, message in told.items() if message}


def _labelled(column: str, labels: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Conditions that a column of JSON has these labels, and their parameters."""
    conditions = (f"and {column}->>cast(:name{n} as text) = :label{n}" for n in range(len(labels)))
    values = {f"name{n}": name for n, name in enumerate(labels)}
    return " ".join(conditions), values | {f"label{n}": v for n, v in enumerate(labels.values())}


def _filled(prefix: str, digit: str) -> UUID:
    """The lowest or highest id that begins with `prefix`."""
    return UUID(prefix.replace("-", "")[:32].ljust(32, digit))


def request_event_id(session_id: UUID) -> str:
    """The `ce-id` of a session's request, the same for every attempt to send it."""
    return f"{session_id}.requested"


def at_parameters(ids: Sequence[UUID]) -> dict[str, Any]:
    """`ids`, and the `first` and `last` of their times: these keep other partitions out of it."""
    times: list[datetime] = [session_time(i) for i in ids]
    return {"ids": list(ids), "first": min(times), "last": max(times)}


def _by(as_of: Position | None) -> dict[str, Any]:
    """The parameters of `_BY`."""
    return {
        "epoch": None if as_of is None else as_of.epoch,
        "sequence": None if as_of is None else as_of.sequence,
    }


def _summary(row: Any) -> Summary:
    return Summary(
        session_id=row.session_id,
        status=row.status,
        code=row.code,
        steps=row.steps,
        reward_total=row.reward_total,
        chain_hash=row.chain_hash or "",
        attempts=row.attempts,
        seed=row.seed,
        group_id=row.group_id,
        labels=row.labels or {},
        episodes=row.episodes,
        rewards_missing=row.rewards_missing,
        specs={"agent": row.agent_spec, "env": row.env_spec, "reward": row.reward_fn_hash},
        policy=row.policy,
    )
