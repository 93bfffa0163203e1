"""The returns of episodes, as the log has them: what a session's agent was told, each reward in its
first revision. A session's rows are found by their keys, so a look costs what is new.

A replica that dies may have said that a reward is missing which another one then has: the first
word is what the agent was told, and it is the same whenever it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, DateTime, Integer, Uuid, bindparam, text

from dsec.scheduler.portions import Portion, Unread
from dsec.scheduler.returns import At
from dsec.session.io import CURRICULUM
from dsec_contracts import keys
from dsec_contracts.canonical import decode
from dsec_contracts.step import STEP_FIELDS

ENDS_MAX = 100_000
"""Ended sessions that are looked at, for whether they have a curriculum."""

_SESSIONS = (
    bindparam("ids", type_=ARRAY(Uuid())),
    bindparam("ats", type_=ARRAY(DateTime(timezone=True))),
)
_INPUTS = STEP_FIELDS.index("inputs")
EPISODES = text(
    """
    select
        s.session_id,
        s.episode,
        count(*),
        max(s.step),
        coalesce(
            array_agg(r.value order by s.step) filter (where r.key is not null and m.key is null),
            '{}'::double precision[]
        ),
        count(m.key),
        (array_agg(s.epoch) filter (where s.terminated or s.truncated))[1],
        (array_agg(s.sequence) filter (where s.terminated or s.truncated))[1],
        (array_agg(s.index) filter (where s.terminated or s.truncated))[1],
        (array_agg(s.fact) filter (where s.terminated or s.truncated))[1]
    from unnest(:ids, :ats, :firsts, :lasts) as a(session_id, session_at, first, last)
    cross join lateral generate_series(a.first, a.last) as n(step)
    join event_log s on s.session_id = a.session_id and s.session_at = a.session_at
        and s.key = 'step:' || n.step
    left join event_log r on r.session_id = a.session_id and r.session_at = a.session_at
        and r.key = 'reward:' || n.step || '.1'
    left join event_log m on m.session_id = a.session_id and m.session_at = a.session_at
        and m.key = 'reward_missing:' || n.step
        and (r.key is null or (m.epoch, m.sequence, m.index) < (r.epoch, r.sequence, r.index))
    group by s.session_id, s.episode
    order by s.session_id, s.episode
    """
).bindparams(
    *_SESSIONS,
    bindparam("firsts", type_=ARRAY(Integer())),
    bindparam("lasts", type_=ARRAY(Integer())),
)


ENDED = text(
    """
    with over as (
        select session_id, session_at, epoch, sequence, index, fact_json->>'steps' as steps
        from event_log where kind = 'session.ended' and step is null
        order by epoch desc, sequence desc limit :ends
    )
    select o.session_id, o.epoch, o.sequence, o.index, o.steps::integer,
        r.fact_json->>'agent_spec', (r.fact_json->>'curriculum_level')::integer,
        r.fact_json->>'reward_fn_hash'
    from over o join event_log r on r.session_id = o.session_id and r.session_at = o.session_at
        and r.key = 'requested'
    where r.fact_json->>'curriculum_level' is not null
    order by o.epoch desc, o.sequence desc limit :sessions
    """
)
CHANGES = text(
    """
    select c.session_id, (c.fact_json->>'n')::integer, (c.fact_json->>'level')::integer
    from unnest(:ids, :ats) as a(session_id, session_at)
    join event_log c on c.session_id = a.session_id and c.session_at = a.session_at
        and c.key >= 'curriculum:' and c.key < 'curriculum;'
    """
).bindparams(*_SESSIONS)
# No step lies behind one that is not there, so their number is found bit by bit.
STEPS = text(
    """
    select a.session_id, found.steps
    from unnest(:ids, :ats) as a(session_id, session_at)
    cross join lateral (
        with recursive search(steps, bit) as (
            select 0, 1 << 30
            union all
            select case when exists (
                select from event_log s where s.session_id = a.session_id
                and s.session_at = a.session_at and s.key = 'step:' || (steps + bit - 1)
            ) then steps + bit else steps end, bit >> 1
            from search where bit > 0
        )
        select steps from search where bit = 0
    ) found
    """
).bindparams(*_SESSIONS)


@dataclass(frozen=True, slots=True)
class Ended:
    """A session with a curriculum that has ended."""

    session_id: UUID
    at: At
    """Where in the log its end is."""
    steps: int
    agent_spec: str
    level: int
    """Of its first episode."""
    reward_spec: str


def sessions(session_ids: list[UUID]) -> dict[str, Any]:
    """What a query of whole sessions asks for."""
    return {"ids": session_ids, "ats": [keys.session_time(one) for one in session_ids]}


def parameters(unread: list[Unread]) -> dict[str, Any]:
    """What the query of episodes asks for."""
    return sessions([one.session_id for one in unread]) | {
        "firsts": [one.first_step for one in unread],
        "lasts": [one.last_step for one in unread],
    }


def portion(row: Any, at: At | None) -> Portion:
    """A row of the query of episodes.

    Args:
        at: where its last step is.
    """
    session_id, episode, steps, last_step, rewards, missing, *_, fact = row
    change = None
    if fact is not None:
        named = decode(bytes(fact))[_INPUTS]
        change = max((n for kind, n, _ in named if kind == CURRICULUM), default=None)
    return Portion(session_id, episode, steps, last_step, rewards, missing, at, change)
