"""The views: what people ask of the log, in words of theirs. Every column has a comment.

All of them start from one session's rows through the unique key, so `where session_id = …` is
fast; with `and session_at = session_time(…)` the planner looks at one partition only. A step's own
facts are canonical bytes, which SQL cannot read: what views need of them stands in typed columns.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Circumstances are kept as they came, and every operator on `json` fails at one escaped NUL: a
# picture of it stands in.
TEXT_OF = r"replace({}.circumstance::text, '\u0000', '\u2400')::json->>'{}'"

SESSION_SUMMARY = """
create view session_summary as
select
    r.session_id,
    r.session_at,
    case
        when e.key is not null then e.fact_json->>'status'
        when j.key is not null then 'rejected'
        when p.attempts is not null then 'running'
        else 'queued'
    end as status,
    coalesce(e.fact_json->>'code', j.fact_json->>'code') as code,
    (r.fact_json->>'seed')::bigint as seed,
    r.fact_json->'labels' as labels,
    r.fact_json->>'group_id' as group_id,
    (r.fact_json->>'rollout_index')::bigint as rollout_index,
    (r.fact_json->>'max_steps')::integer as max_steps,
    coalesce((e.fact_json->>'steps')::integer, t.last_step + 1, 0) as steps,
    coalesce((e.fact_json->>'episodes')::integer, t.episodes, 0)::integer as episodes,
    w.reward_total,
    m.rewards_missing,
    coalesce(p.attempts, 0) as attempts,
    encode(coalesce(e.chain, l.chain, s.chain), 'hex') as chain_hash,
    r.event_time as requested_at,
    s.event_time as started_at,
    e.event_time as ended_at,
    r.fact_json->>'agent_spec' as agent_spec,
    r.fact_json->>'env_spec' as env_spec,
    r.fact_json->>'reward_fn_hash' as reward_fn_hash,
    r.policy
from event_log r
left join event_log e
    on e.session_id = r.session_id and e.session_at = r.session_at and e.key = 'ended'
left join event_log s
    on s.session_id = r.session_id and s.session_at = r.session_at and s.key = 'started'
left join event_log j
    on j.session_id = '016f5e66-e800-7000-8000-000000000000'
    and j.session_at = '2020-01-01 00:00:00+00' and j.key = 'rejected:' || r.event_id
left join lateral (
    select max(x.attempt) as attempts from event_log x
    where x.session_id = r.session_id and x.session_at = r.session_at
        and x.key >= 'placed:' and x.key < 'placed;'
) p on true
left join lateral (
    select max(x.step) as last_step,
        count(*) filter (where x.terminated or x.truncated) as episodes
    from event_log x
    where e.key is null and x.session_id = r.session_id and x.session_at = r.session_at
        and x.key >= 'step:' and x.key < 'step;'
) t on true
left join event_log l
    on l.session_id = r.session_id and l.session_at = r.session_at
    and l.key = 'step:' || t.last_step
left join lateral (
    select sum(y.value order by y.step) as reward_total
    from (
        select distinct on (x.step) x.step, x.value from event_log x
        where x.session_id = r.session_id and x.session_at = r.session_at
            and x.key >= 'reward:' and x.key < 'reward;'
        order by x.step, split_part(x.key, '.', 2)::integer desc
    ) y
) w on true
left join lateral (
    select count(*) as rewards_missing from event_log x
    where x.session_id = r.session_id and x.session_at = r.session_at
        and x.key >= 'reward_missing:' and x.key < 'reward_missing;'
        and not exists (
            select from event_log y
            where y.session_id = x.session_id and y.session_at = x.session_at
                and y.key >= 'reward:' || x.step || '.' and y.key < 'reward:' || x.step || '/')
) m on true
where r.key = 'requested' and r.kind = 'session.requested' and r.step is null
"""

REWARD_TRACE = """
create view reward_trace as
select
    w.session_id,
    w.session_at,
    r.fact_json->>'group_id' as group_id,
    w.step,
    s.episode,
    case when w.kind = 'reward.scored' then split_part(w.key, '.', 2)::integer end as revision,
    w.value as reward,
    s.value as env_reward,
    w.fact_json->>'code' as missing
from event_log w
left join event_log s
    on s.session_id = w.session_id and s.session_at = w.session_at and s.key = 'step:' || w.step
left join event_log r
    on r.session_id = w.session_id and r.session_at = w.session_at and r.key = 'requested'
where w.kind in ('reward.scored', 'reward.missing')
"""

STEP_TRACE = """
create view step_trace as
select
    s.session_id,
    s.session_at,
    s.step,
    s.episode,
    s.value as env_reward,
    s.terminated,
    s.truncated or (
        not s.terminated and e.fact_json->>'code' = 'max_steps'
        and s.step = (e.fact_json->>'steps')::integer - 1) as truncated,
    encode(s.chain, 'hex') as chain_hash,
    s.policy,
    s.attempt,
    s.cause,
    s.event_time
from event_log s
left join event_log e
    on e.session_id = s.session_id and e.session_at = s.session_at and e.key = 'ended'
where s.kind = 'session.stepped'
"""

CAUSAL_EDGE = """
create view causal_edge as
select
    x.session_id,
    x.session_at,
    x.session_id || '/' || x.key as effect,
    case
        when x.cause ~ '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}/' then x.cause
        else x.session_id || '/' || x.cause
    end as cause,
    x.kind
from event_log x
where x.cause is not null
"""

PLACEMENT = f"""
create view placement as
select
    p.session_id,
    p.session_at,
    p.attempt,
    p.fact_json->>'worker' as worker,
    p.fact_json->>'lane' as lane,
    p.fact_json->>'previous_lane' as previous_lane,
    p.fact_json->>'stage' as stage,
    (p.fact_json->>'alone')::boolean as alone,
    {TEXT_OF.format("p", "reason")} as reason,
    p.event_time as placed_at
from event_log p
where p.kind = 'session.placed' and p.step is null
"""

SPEC = f"""
create view spec as
select
    x.fact_json->>'spec_hash' as spec_hash,
    x.fact_json->>'kind' as kind,
    {TEXT_OF.format("x", "name")} as name,
    x.fact_json->>'blob' as blob,
    octet_length(x.fact) as fact_bytes,
    x.event_time as registered_at
from event_log x
where x.kind = 'spec.registered' and x.step is null
"""

POLICY = """
create view policy as
select
    x.fact_json->>'name' as name,
    x.fact_json->>'version' as version,
    x.fact_json->>'content_hash' as content_hash,
    x.fact_json->>'blob' as blob,
    (x.fact_json->>'size_bytes')::bigint as size_bytes,
    x.event_time as published_at
from event_log x
where x.kind = 'policy.published' and x.step is null
"""

REJECTION = f"""
create view rejection as
select
    x.fact_json->>'event_id' as event_id,
    x.fact_json->>'session_id' as session_id,
    x.fact_json->>'code' as code,
    x.fact_json->>'field' as field,
    {TEXT_OF.format("x", "message")} as message,
    x.event_time as rejected_at
from event_log x
where x.kind = 'session.rejected' and x.step is null
"""

ID = {
    "session_id": "the session",
    "session_at": "the time in its id, equal to session_time(session_id)",
}
VIEWS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    (
        "session_summary",
        SESSION_SUMMARY,
        "one row a requested session: where it stands and how it did",
        {
            **ID,
            "status": "queued, running, completed, failed, cancelled; rejected if never admitted",
            "code": "how it ended, such as max_steps, or why it was rejected",
            "seed": "as requested",
            "labels": "as requested, a JSON object of texts",
            "group_id": "the group of rollouts it belongs to",
            "rollout_index": "its place in the group",
            "max_steps": "environment steps it may take, over all episodes",
            "steps": "environment steps taken",
            "episodes": "finished episodes",
            "reward_total": "sum over the steps of their newest rewards; null while none has come",
            "rewards_missing": "steps whose reward will not come and has not come",
            "attempts": "placements so far",
            "chain_hash": "last hash of the chain, in hexadecimal",
            "requested_at": "when it was asked for",
            "started_at": "when its environment was first reset",
            "ended_at": "when it ended",
            "agent_spec": "hash of the agent's spec",
            "env_spec": "hash of the environment's spec",
            "reward_fn_hash": "hash of the reward's spec",
            "policy": "name@version of the weights it was requested with",
        },
    ),
    (
        "reward_trace",
        REWARD_TRACE,
        "one row a reward, every revision of it, and one a missing reward",
        {
            **ID,
            "group_id": "the session's group of rollouts",
            "step": "the step that is rewarded",
            "episode": "its episode; null while the step itself is not logged",
            "revision": "from 1; the highest counts; null where the reward is missing",
            "reward": "the weighted total; null where the reward is missing",
            "env_reward": "the environment's own reward of the step",
            "missing": "why the reward will not come; null where it came",
        },
    ),
    (
        "step_trace",
        STEP_TRACE,
        "one row an environment step",
        {
            **ID,
            "step": "from 0 over the session",
            "episode": "from 0",
            "env_reward": "the environment's own reward",
            "terminated": "the environment ended the episode",
            "truncated": "the environment cut the episode short, or the session's max_steps did",
            "chain_hash": "chain hash after the step, in hexadecimal",
            "policy": "name@version of the weights that chose the action",
            "attempt": "placement under which it was taken",
            "cause": "key of what caused it, within the session",
            "event_time": "when it was taken",
        },
    ),
    (
        "causal_edge",
        CAUSAL_EDGE,
        "the causal graph: one row an event that names its cause",
        {
            **ID,
            "effect": "the event, <session id>/<key>",
            "cause": "what caused it, <session id>/<key>",
            "kind": "the effect's event name",
        },
    ),
    (
        "placement",
        PLACEMENT,
        "one row a placement of a session on a worker",
        {
            **ID,
            "attempt": "from 1",
            "worker": "where it was placed",
            "lane": "the worker's lane",
            "previous_lane": "the lane of the attempt before",
            "stage": "stage of the execution plan",
            "alone": "it shares its worker with no other session",
            "reason": "why it was placed",
            "placed_at": "when",
        },
    ),
    (
        "spec",
        SPEC,
        "one row a registered spec",
        {
            "spec_hash": "hash of its canonical bytes",
            "kind": "agent, env, reward or tool",
            "name": "for people",
            "blob": "key in the object store where the bytes are too large for a message",
            "fact_bytes": "size of the logged fact",
            "registered_at": "when",
        },
    ),
    (
        "policy",
        POLICY,
        "one row a published version of a policy's weights",
        {
            "name": "the policy",
            "version": "of its weights",
            "content_hash": "hash of the weights' bytes",
            "blob": "their key in the object store",
            "size_bytes": "their size",
            "published_at": "when",
        },
    ),
    (
        "rejection",
        REJECTION,
        "one row a request that was not admitted",
        {
            "event_id": "ce-id of the rejected event",
            "session_id": "the session id as it was written, which need not be one",
            "code": "why",
            "field": "which field",
            "message": "the sentence for people",
            "rejected_at": "when",
        },
    ),
)


def upgrade() -> None:
    connection = op.get_bind()
    for name, definition, comment, columns in VIEWS:
        connection.exec_driver_sql(definition.replace("%", "%%"))
        connection.exec_driver_sql(f"comment on view {name} is {literal(comment)}")
        for column, text in columns.items():
            connection.exec_driver_sql(f"comment on column {name}.{column} is {literal(text)}")


def literal(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''").replace("%", "%%") + "'"


def downgrade() -> None:
    raise NotImplementedError("the log is append-only: restore a backup instead")
