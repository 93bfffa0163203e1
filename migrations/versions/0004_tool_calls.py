"""The view of tool calls: each with what came of it."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TOOL_CALL = r"""
create view tool_call as
select
    c.session_id,
    c.session_at,
    (c.fact_json->>'step')::int as step,
    (c.fact_json->>'turn')::int as turn,
    (x.place - 1)::int as call,
    x.one->>'id' as call_id,
    x.one->'function'->>'name' as tool,
    x.one->'function'->>'arguments' as arguments,
    case r.kind when 'tool.returned' then 'returned' when 'tool.failed' then 'failed'
        else 'waiting' end as status,
    case r.kind when 'tool.failed' then r.fact_json->>'code' end as code,
    case r.kind when 'tool.failed' then r.fact_json->>'message' end as message,
    (replace(r.circumstance::text, '\u0000', '\u2400')::json->>'seconds')::float8 as seconds,
    c.event_time as called_at,
    r.event_time as answered_at
from event_log c
cross join lateral json_array_elements((c.fact_json->'calls')::json)
    with ordinality as x (one, place)
left join event_log r
    on r.session_id = c.session_id and r.session_at = c.session_at
    and r.key = 'tool_result:' || (c.fact_json->>'step') || '.' || (c.fact_json->>'turn')
        || '.' || (x.place - 1)
where c.kind = 'tool.called' and c.step is null
"""

COMMENT = "one row a tool call"
COLUMNS = {
    "session_id": "the session",
    "session_at": "the time in its id, equal to session_time(session_id)",
    "step": "the environment step that was being decided",
    "turn": "from 0 at each step",
    "call": "from 0 in its turn",
    "call_id": "as the agent knows it",
    "tool": "what the agent calls the tool",
    "arguments": "JSON as the agent gave it; null where it is longer than queries carry",
    "status": "waiting, returned or failed",
    "code": "why it failed",
    "message": "why it failed, as the agent was told",
    "seconds": "how long the call took; null where it was answered without one",
    "called_at": "when the turn was first published",
    "answered_at": "when the answer was",
}


def upgrade() -> None:
    connection = op.get_bind()
    connection.exec_driver_sql(TOOL_CALL.replace("%", "%%"))
    connection.exec_driver_sql(f"comment on view tool_call is '{COMMENT}'")
    for column, text in COLUMNS.items():
        connection.exec_driver_sql(f"comment on column tool_call.{column} is '{text}'")


def downgrade() -> None:
    raise NotImplementedError("the log is append-only: restore a backup instead")
