"""What the scheduler asks the log, in SQL. `history.py` asks it."""

from __future__ import annotations

from sqlalchemy import ARRAY, DateTime, Text, Uuid, bindparam, text

FLOOR = text(
    "select epoch, sequence, stream_created, message_time from log_floor"
    " order by epoch desc limit 1"
)
SPECS = text(
    "select fact_json->>'spec_hash', fact_json->>'kind', circumstance->'services', "
    "circumstance->'per_episode' from event_log "
    "where kind = 'spec.registered' and step is null"
)
SERVICES = text("select fact from event_log where kind = 'service.declared' and step is null")
PARKED = text("select 1 from event_parked where event_type = any(:types) limit 1").bindparams(
    bindparam("types", type_=ARRAY(Text()))
)
POLICIES = text("select key from event_log where kind = 'policy.published' and step is null")
FENCES = text(
    "select kind, epoch, sequence, fact, circumstance::text, event_time from event_log "
    "where kind = 'worker.fenced' and step is null and (epoch, sequence) <= (:epoch, :sequence)"
)
PLACED = text(
    """
    with open as (
        select p.session_id, p.session_at from event_log p
        where p.kind = 'session.placed' and p.step is null and p.key = 'placed:1'
        and not exists (
            select from event_log e where e.session_id = p.session_id
            and e.session_at = p.session_at and e.key = 'ended'
        )
    )
    select l.kind, l.epoch, l.sequence, l.fact, l.circumstance::text, l.event_time
    from open join event_log l using (session_id, session_at)
    where l.step is null and (l.epoch, l.sequence) <= (:epoch, :sequence)
    and l.kind in ('session.requested', 'session.cancel_requested', 'session.placed',
                   'session.released', 'curriculum.changed')
    """
)
ENDED_SINCE = text(
    """
    with over as (
        select session_id, session_at from event_log
        where kind = 'session.ended' and step is null
        and (epoch, sequence) > (:epoch, :after) and (epoch, sequence) <= (:epoch, :sequence)
        order by epoch desc, sequence desc limit :limit
    )
    select l.kind, l.epoch, l.sequence, l.fact, l.circumstance::text, l.event_time
    from over join event_log l using (session_id, session_at)
    where l.step is null and l.kind in ('session.placed', 'session.released', 'session.ended')
    order by l.epoch, l.sequence
    """
)
WAITING = text(
    """
    select r.event_id, r.epoch, r.sequence, r.fact, c.circumstance->>'code'
    from event_log r
    left join event_log c on c.session_id = r.session_id and c.session_at = r.session_at
        and c.key = 'cancel_requested'
    where r.kind = 'session.requested' and r.step is null
    and (r.epoch, r.sequence) >= (:from_epoch, :from_sequence)
    and (r.epoch, r.sequence) <= (:epoch, :sequence)
    and not exists (
        select from event_log o where o.session_id = r.session_id
        and o.session_at = r.session_at and o.key in ('ended', 'placed:1')
    )
    and not exists (
        select from event_log j where j.session_id = :system and j.session_at = :system_at
        and j.key = 'rejected:' || r.event_id
    )
    order by r.epoch, r.sequence limit :limit
    """
)
PRIOR = text(
    """
    select r.session_id, r.key, r.epoch, r.sequence, r.fact, r.circumstance->>'code', exists (
        select from event_log j where j.session_id = :system and j.session_at = :system_at
        and j.key = 'rejected:' || r.event_id
    )
    from event_log r
    where r.session_id = any(:ids) and r.session_at between :earliest and :latest
    and r.key in ('requested', 'cancel_requested')
    """
).bindparams(
    bindparam("ids", type_=ARRAY(Uuid())),
    bindparam("earliest", type_=DateTime(timezone=True)),
    bindparam("latest", type_=DateTime(timezone=True)),
)
TAIL = text(
    """
    select
        (select chain from event_log where session_id = :id and session_at = :at
            and key = 'started'),
        (select chain from event_log where session_id = :id and session_at = :at
            and kind = 'session.stepped' order by step desc limit 1),
        count(*), coalesce(max(step) + 1, 0), count(*) filter (where terminated or truncated)
    from event_log
    where session_id = :id and session_at = :at and kind = 'session.stepped'
    """
)
