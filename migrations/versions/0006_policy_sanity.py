"""The view of what agents say about their decisions, by agent, from the evaluator's events."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

POLICY_SANITY = """
create view policy_sanity as
select
    c.session_id,
    c.session_at,
    c.fact_json->>'agent_spec' as agent_spec,
    (c.fact_json->>'steps')::integer as steps,
    (c.fact_json->>'with_provenance')::integer as with_provenance,
    (c.fact_json->>'provenance_malformed')::integer as provenance_malformed,
    (c.fact_json->>'tool_calls')::integer as tool_calls,
    (c.fact_json->>'tool_calls_without_provenance')::integer as tool_calls_without_provenance,
    (c.fact_json->>'unknown_calls_total')::integer as unknown_tool_calls,
    c.fact_json->'unknown_calls' as unknown_calls,
    c.fact_json->'confident' as confident,
    c.fact_json->'confidence_sum' as confidence_sum,
    c.fact_json->'reward_sum' as reward_sum,
    c.event_time as checked_at
from event_log c
where c.kind = 'policy.sanity_checked' and c.step is null
"""

COMMENT = "one row a session that ended and whose agent gave provenance or called tools"
COLUMNS = {
    "session_id": "the session",
    "session_at": "the time in its id, equal to session_time(session_id)",
    "agent_spec": "hash of its agent''s spec: group by it",
    "steps": "environment steps it took",
    "with_provenance": "steps whose action came with provenance",
    "provenance_malformed": "steps whose provenance is no mapping, or has a confidence not in 0..1",
    "tool_calls": "tool calls it made",
    "tool_calls_without_provenance": "of these, those that no later step names",
    "unknown_tool_calls": "how often a step named a call that had not happened",
    "unknown_calls": "the first of them: step and tool_call_id",
    "confident": "ten bins of confidence, 0 to 1: steps with a confidence and a finite reward",
    "confidence_sum": "per bin, over these steps",
    "reward_sum": "per bin, over these steps; the rewards that the agent was given",
    "checked_at": "when",
}


def upgrade() -> None:
    connection = op.get_bind()
    connection.exec_driver_sql(POLICY_SANITY.replace("%", "%%"))
    connection.exec_driver_sql(f"comment on view policy_sanity is '{COMMENT}'")
    for column, text in COLUMNS.items():
        connection.exec_driver_sql(f"comment on column policy_sanity.{column} is '{text}'")


def downgrade() -> None:
    raise NotImplementedError("the log is append-only: restore a backup instead")
