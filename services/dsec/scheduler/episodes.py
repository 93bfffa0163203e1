"""The returns of episodes, as the log has them: what a session's agent was told, each reward in its
first revision. A session's rows are found by their keys, so a look costs what is new."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ARRAY, DateTime, Integer, Uuid, bindparam, text

from dsec.scheduler.curriculum import Portion, Unread
from dsec.session.io import CURRICULUM
from dsec_contracts import keys
from dsec_contracts.canonical import decode
from dsec_contracts.step import STEP_FIELDS

_INPUTS = STEP_FIELDS.index("inputs")
EPISODES = text(
    """
    select
        s.session_id,
        count(*),
        max(s.step),
        count(r.value),
        count(m.key) filter (where r.value is null),
        coalesce(sum(r.value order by s.step), 0.0),
        (array_agg(s.fact) filter (where s.terminated or s.truncated))[1]
    from unnest(:ids, :ats, :firsts, :lasts) as a(session_id, session_at, first, last)
    cross join lateral generate_series(a.first, a.last) as n(step)
    join event_log s on s.session_id = a.session_id and s.session_at = a.session_at
        and s.key = 'step:' || n.step
    left join event_log r on r.session_id = a.session_id and r.session_at = a.session_at
        and r.key = 'reward:' || n.step || '.1'
    left join event_log m on m.session_id = a.session_id and m.session_at = a.session_at
        and m.key = 'reward_missing:' || n.step
    group by s.session_id, s.episode
    order by s.session_id, s.episode
    """
).bindparams(
    bindparam("ids", type_=ARRAY(Uuid())),
    bindparam("ats", type_=ARRAY(DateTime(timezone=True))),
    bindparam("firsts", type_=ARRAY(Integer())),
    bindparam("lasts", type_=ARRAY(Integer())),
)


def parameters(unread: list[Unread]) -> dict[str, Any]:
    """What the query asks for."""
    return {
        "ids": [one.session_id for one in unread],
        "ats": [keys.session_time(one.session_id) for one in unread],
        "firsts": [one.first_step for one in unread],
        "lasts": [one.last_step for one in unread],
    }


def portion(row: Any) -> Portion:
    """A row of the query."""
    session_id, steps, last_step, rewarded, missing, total, fact = row
    change = None
    if fact is not None:
        named = decode(bytes(fact))[_INPUTS]
        change = max((n for kind, n, _ in named if kind == CURRICULUM), default=None)
    return Portion(session_id, steps, last_step, rewarded, missing, total, fact is not None, change)
