"""The view of curriculum changes: each with the step whose reset it was delivered at.

A step names a change by kind, ordinal and hash, in canonical bytes; the hash is that of the
canonical `[n, level]`. They are looked for as bytes, so no fact is decoded.
"""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

CURRICULUM_CHANGE = r"""
create view curriculum_change as
select
    c.session_id,
    c.session_at,
    c.n,
    c.level,
    c.previous_level,
    c.why,
    c.changed_at,
    (
        select min(s.step) from event_log s
        where s.session_id = c.session_id and s.session_at = c.session_at
            and s.kind = 'session.stepped' and (s.terminated or s.truncated)
            and position(
                '\x836a'::bytea || 'curriculum'::bytea || canonical_ordinal(c.n) || '\x50'::bytea
                || substring(
                    sha256('\x82'::bytea || canonical_ordinal(c.n) || canonical_ordinal(c.level))
                    for 16
                ) in s.fact
            ) > 0
    ) as delivered_at_step
from (
    select
        l.session_id,
        l.session_at,
        (l.fact_json->>'n')::integer as n,
        (l.fact_json->>'level')::integer as level,
        (l.fact_json->>'previous_level')::integer as previous_level,
        l.circumstance->>'why' as why,
        l.event_time as changed_at
    from event_log l
    where l.kind = 'curriculum.changed' and l.step is null
) c
"""

COMMENT = "one row a change of a session''s curriculum level"
COLUMNS = {
    "session_id": "the session",
    "session_at": "the time in its id, equal to session_time(session_id)",
    "n": "the changes of a session count from 1",
    "level": "the level that it was given",
    "previous_level": "the level that it had been given before, or was requested with",
    "why": "rewards_lag, rewards_recovered or threshold",
    "changed_at": "when the scheduler said so",
    "delivered_at_step": (
        "the last step of the episode before the first one with this level; null until then, and "
        "where a later change took its place"
    ),
}


def upgrade() -> None:
    connection = op.get_bind()
    connection.exec_driver_sql(CURRICULUM_CHANGE.replace("%", "%%"))
    connection.exec_driver_sql(f"comment on view curriculum_change is '{COMMENT}'")
    for column, text in COLUMNS.items():
        connection.exec_driver_sql(f"comment on column curriculum_change.{column} is '{text}'")


def downgrade() -> None:
    raise NotImplementedError("the log is append-only: restore a backup instead")
