"""The view of anchors: each with what became of its blob."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ANCHOR = r"""
create view anchor as
select
    c.session_id,
    c.session_at,
    (c.fact_json->>'position')::int as position,
    c.fact_json->>'anchor_id' as anchor_id,
    c.fact_json->'tags' as tags,
    c.fact_json->'parents'->>0 as parent,
    (c.fact_json->>'covers_agent')::boolean as covers_agent,
    (c.fact_json->>'fold_version')::int as fold_version,
    case r.kind when 'anchor.stored' then 'stored' when 'anchor.lost' then 'lost'
        else 'captured' end as status,
    case r.kind when 'anchor.lost' then r.fact_json->>'code' end as code,
    case r.kind when 'anchor.lost'
        then replace(r.circumstance::text, '\u0000', '\u2400')::json->>'message' end as message,
    coalesce(case r.kind when 'anchor.stored' then r.fact_json->>'blob' end, c.told->>'blob')
        as blob,
    coalesce(
        case r.kind when 'anchor.stored' then (r.fact_json->>'size_bytes')::bigint end,
        (c.told->>'size_bytes')::bigint) as size_bytes,
    c.attempt,
    c.event_time as captured_at,
    case r.kind when 'anchor.stored' then r.event_time end as stored_at
from (
    select x.*, replace(x.circumstance::text, '\u0000', '\u2400')::json as told
    from event_log x where x.kind = 'anchor.captured' and x.step is null
) c
left join event_log r
    on r.session_id = c.session_id and r.session_at = c.session_at
    and r.key = 'anchor_result:' || (c.fact_json->>'position')
"""

COMMENT = "one row an anchor"
COLUMNS = {
    "session_id": "the session",
    "session_at": "the time in its id, equal to session_time(session_id)",
    "position": "environment steps that the session had taken: it stands behind step position - 1",
    "anchor_id": "derived from the seed, the position and the content",
    "tags": "why it was taken: every_steps, episode_start, agent; and the agent''s own",
    "parent": "the id of the session''s anchor before it; null for the first",
    "covers_agent": "the agent''s state is in its content, and compared on re-execution",
    "fold_version": "version of what the blob holds",
    "status": "captured (on its way), stored or lost",
    "code": "why it is lost",
    "message": "why it is lost, for people",
    "blob": "name of its bytes in the object store: their SHA-256",
    "size_bytes": "bytes of the blob, compressed",
    "attempt": "placement under which it was captured, from 1",
    "captured_at": "when it was published",
    "stored_at": "when anchor-sync said that it is stored; null until then",
}


def upgrade() -> None:
    connection = op.get_bind()
    connection.exec_driver_sql(ANCHOR.replace("%", "%%"))
    connection.exec_driver_sql(f"comment on view anchor is '{COMMENT}'")
    for column, text in COLUMNS.items():
        connection.exec_driver_sql(f"comment on column anchor.{column} is '{text}'")


def downgrade() -> None:
    raise NotImplementedError("the log is append-only: restore a backup instead")
