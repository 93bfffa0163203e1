"""The view of deferred rewards: each with the step before which the agent was told.

An output names what was delivered before it by kind, ordinal and hash, in canonical bytes. They are
looked for as bytes, with the hash where the reward has one, so no fact is decoded.
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

FUNCTION = r"""
create function canonical_ordinal(n integer) returns bytea
language sql immutable strict parallel safe
as $$
    select case
        when n < 24 then decode(lpad(to_hex(n), 2, '0'), 'hex')
        when n < 256 then '\x18'::bytea || decode(lpad(to_hex(n), 2, '0'), 'hex')
        when n < 65536 then '\x19'::bytea || decode(lpad(to_hex(n), 4, '0'), 'hex')
        else '\x1a'::bytea || decode(lpad(to_hex(n), 8, '0'), 'hex')
    end
$$;
comment on function canonical_ordinal(integer) is 'the canonical bytes of a number from 0';
"""

DEFERRED_REWARD = r"""
create view deferred_reward as
select
    d.session_id,
    d.session_at,
    d.step,
    d.fact_json->>'code' as code,
    d.event_time as deferred_at,
    a.event_time as answered_at,
    a.value as reward,
    coalesce(
        (
            select min(y.step) from event_log y
            where y.session_id = d.session_id and y.session_at = d.session_at
                and y.kind = 'session.stepped' and y.step > d.step and y.step <= d.step + 1024
                and position(a.named in y.fact) > 0
        ),
        (
            select (e.fact_json->>'steps')::integer from event_log e
            where e.session_id = d.session_id and e.session_at = d.session_at
                and e.key = 'ended' and e.kind = 'session.ended'
                and position(
                    a.named in decode(translate(e.fact_json->>'inputs', '-_', '+/'), 'base64')
                ) > 0
        )
    ) as delivered_before_step
from event_log d
left join lateral (
    select
        w.event_time,
        w.value,
        case w.kind
            when 'reward.scored' then '\x8366'::bytea || 'reward'::bytea
                || canonical_ordinal(d.step) || '\x50'::bytea || substring(sha256(w.fact) for 16)
            else '\x836e'::bytea || 'reward_missing'::bytea
                || canonical_ordinal(d.step) || '\x50'::bytea
        end as named
    from event_log w
    where w.session_id = d.session_id and w.session_at = d.session_at
        and w.key in ('reward:' || d.step || '.1', 'reward_missing:' || d.step)
    order by w.epoch, w.sequence, w.index
    limit 1
) a on true
where d.kind = 'reward.deferred'
"""

COMMENT = "one row a reward that came later than its step"
COLUMNS = {
    "session_id": "the session",
    "session_at": "the time in its id, equal to session_time(session_id)",
    "step": "the step that is rewarded",
    "code": "why its reward was deferred",
    "deferred_at": "when that was said",
    "answered_at": "when it came, or that there is none; null until then",
    "reward": "the reward; null until it comes, and where there is none",
    "delivered_before_step": (
        "the agent was told before this step was decided, or, where it is the number of steps, at "
        "the end; null until then"
    ),
}


def upgrade() -> None:
    connection = op.get_bind()
    connection.exec_driver_sql((FUNCTION + DEFERRED_REWARD).replace("%", "%%"))
    connection.exec_driver_sql(f"comment on view deferred_reward is '{COMMENT}'")
    for column, text in COLUMNS.items():
        connection.exec_driver_sql(f"comment on column deferred_reward.{column} is '{text}'")


def downgrade() -> None:
    raise NotImplementedError("the log is append-only: restore a backup instead")
