"""Dropping what is old, and rewards by the hour; compressed and kept up by the server where its
licence has that.

TimescaleDB's Apache edition, which many clouds offer, has neither policies nor compression nor
continuous aggregates, and plain PostgreSQL has no TimescaleDB. So dropping is ours everywhere,
and `session_reward` is a continuous aggregate under the `timescale` licence and a plain view of
the same name and columns elsewhere.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

CHUNKS = """
create function event_log_ranges()
returns table (name text, range_start timestamptz, range_end timestamptz)
language sql stable
as $$
    select format('%I.%I', c.chunk_schema, c.chunk_name), c.range_start, c.range_end
    from timescaledb_information.chunks c
    where c.hypertable_name = 'event_log' and c.hypertable_schema = current_schema()
$$;
"""

PARTITIONS = """
create function event_log_ranges()
returns table (name text, range_start timestamptz, range_end timestamptz)
language sql stable
as $$
    select c.oid::regclass::text, b[1]::timestamptz, b[2]::timestamptz
    from pg_inherits i
    join pg_class c on c.oid = i.inhrelid
    -- The default partition has no bounds and is not matched.
    cross join regexp_matches(
        pg_get_expr(c.relpartbound, c.oid), 'FROM \\(''(.+)''\\) TO \\(''(.+)''\\)') b
    where i.inhparent = 'event_log'::regclass
$$;
"""

FINISHED = """
comment on function event_log_ranges() is
    'the partitions or chunks of the log and the times of the sessions in them';

create function event_log_finished(before timestamptz)
returns table (name text, range_start timestamptz, range_end timestamptz)
language sql stable
as $$
    select p.name, p.range_start, p.range_end
    from event_log_ranges() p
    where p.range_end <= before
        -- Events about no session, such as specs, stand here: they are never finished.
        and not (p.range_start <= '2020-01-01 00:00:00+00'
            and p.range_end > '2020-01-01 00:00:00+00')
        and not exists (
            select from event_log r
            where r.session_at >= p.range_start and r.session_at < p.range_end
                and r.kind = 'session.requested' and r.step is null
                and not exists (
                    select from event_log e
                    where e.session_id = r.session_id and e.session_at = r.session_at
                        and e.key = 'ended')
                and not exists (
                    select from event_log j
                    where j.session_id = '016f5e66-e800-7000-8000-000000000000'
                        and j.session_at = '2020-01-01 00:00:00+00'
                        and j.key = 'rejected:' || r.event_id))
    order by p.range_start
$$;
comment on function event_log_finished(timestamptz) is
    'partitions or chunks that end before a time and hold no session that is open';

create function event_log_drop(before timestamptz) returns setof text
language plpgsql
as $$
declare
    names text[];
    starts timestamptz[];
    ends timestamptz[];
begin
    -- Read to the end first: what an open query reads cannot be dropped.
    select array_agg(f.name), array_agg(f.range_start), array_agg(f.range_end)
        into names, starts, ends from event_log_finished(before) f;
    for i in 1 .. coalesce(cardinality(names), 0) loop
        execute format('drop table %s', names[i]);
        delete from event_aside a where a.session_at >= starts[i] and a.session_at < ends[i];
        return next names[i];
    end loop;
end
$$;
comment on function event_log_drop(timestamptz) is
    'drop what event_log_finished names, and what was put aside of it; says what was dropped';
"""
DROP_PARTITION = "        execute format('drop table %s', names[i]);\n"
DROP_CHUNK = """\
        perform drop_chunks('event_log', older_than => ends[i], newer_than => starts[i]);
"""

# Compressed are chunks that are finished, two weeks after their end. The extension's own policy
# looks at nothing but age, and would compress what is still written: open sessions, and for ever
# the events about no session.
COMPRESSION = """
alter table event_log set (
    timescaledb.compress,
    timescaledb.compress_segmentby = 'session_id',
    timescaledb.compress_orderby = 'session_at, key');

create procedure event_log_compress(job_id integer, config jsonb)
language plpgsql
as $$
declare
    finished text[] := array(
        select f.name from event_log_finished(now() - (config->>'compress_after')::interval) f
        join timescaledb_information.chunks c
            on format('%I.%I', c.chunk_schema, c.chunk_name) = f.name
        where not c.is_compressed);
    chunk text;
begin
    foreach chunk in array finished loop
        perform compress_chunk(chunk::regclass);
    end loop;
end
$$;
comment on procedure event_log_compress(integer, jsonb) is
    'compress finished chunks; run daily by the server';
select add_job('event_log_compress', interval '1 day', '{"compress_after": "14 days"}');
"""

SESSION_REWARD = """
select
    {bucket} as bucket,
    session_id,
    session_at,
    count(*) filter (where kind = 'reward.scored' and split_part(key, '.', 2) = '1') as rewards,
    sum(value) filter (where split_part(key, '.', 2) = '1') as reward_sum,
    min(value) filter (where split_part(key, '.', 2) = '1') as reward_min,
    max(value) filter (where split_part(key, '.', 2) = '1') as reward_max,
    count(*) filter (where kind = 'reward.scored' and split_part(key, '.', 2) <> '1') as revisions,
    count(*) filter (where kind = 'reward.missing') as missing
from event_log
where kind in ('reward.scored', 'reward.missing')
group by 1, 2, 3
"""
PLAIN_VIEW = "create view session_reward as" + SESSION_REWARD.format(
    bucket="date_trunc('hour', session_at, 'UTC')"
)
CONTINUOUS_AGGREGATE = (
    "create materialized view session_reward"
    " with (timescaledb.continuous, timescaledb.materialized_only = false) as"
    + SESSION_REWARD.format(bucket="time_bucket(interval '1 hour', session_at)")
    + "with no data"
)
# Sessions of the last day are read from the log itself: all rows of a session count for the hour
# of its id, so their hours still change.
REFRESH = """
select add_continuous_aggregate_policy(
    'session_reward',
    start_offset => null,
    end_offset => interval '1 day',
    schedule_interval => interval '1 hour')
"""

REWARD_HOURLY = """
create view reward_hourly as
select
    s.bucket,
    r.fact_json->>'agent_spec' as agent_spec,
    count(*) as sessions,
    sum(coalesce(x.rewards, s.rewards))::bigint as rewards,
    sum(case when x.rewards is null then s.reward_sum else x.reward_sum end) as reward_sum,
    min(case when x.rewards is null then s.reward_min else x.reward_min end) as reward_min,
    max(case when x.rewards is null then s.reward_max else x.reward_max end) as reward_max,
    sum(coalesce(x.missing, 0))::bigint as missing
from session_reward s
join event_log r
    on r.session_id = s.session_id and r.session_at = s.session_at and r.key = 'requested'
-- Where rewards were revised or are missing, the newest of each step are read from the log.
left join lateral (
    select
        count(*) filter (where z.scored) as rewards,
        sum(z.value) filter (where z.scored) as reward_sum,
        min(z.value) filter (where z.scored) as reward_min,
        max(z.value) filter (where z.scored) as reward_max,
        count(*) filter (where not z.scored) as missing
    from (
        select distinct on (y.step) y.step, y.value, y.kind = 'reward.scored' as scored
        from event_log y
        where y.session_id = s.session_id and y.session_at = s.session_at
            and y.kind in ('reward.scored', 'reward.missing')
            and y.key >= 'reward' and y.key < 'rewardz'
        order by y.step, y.kind = 'reward.scored' desc,
            nullif(split_part(y.key, '.', 2), '')::integer desc nulls last
    ) z
) x on s.revisions + s.missing > 0
group by 1, 2
"""

ID = {
    "session_id": "the session",
    "session_at": "the time in its id, equal to session_time(session_id)",
}
HOUR = "the hour of the time in the session's id"
VIEWS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "session_reward",
        "one row a session with rewards, as they first came; reward_hourly adds the revisions",
        {
            "bucket": HOUR,
            **ID,
            "rewards": "steps that were rewarded",
            "reward_sum": "sum of their first rewards, to rounding",
            "reward_min": "the smallest of them",
            "reward_max": "the largest of them",
            "revisions": "later rewards for steps that had one",
            "missing": "steps whose reward was said to be missing, at some time",
        },
    ),
    (
        "reward_hourly",
        "one row an hour and agent: the newest rewards of all steps of its sessions",
        {
            "bucket": HOUR,
            "agent_spec": "hash of the agent's spec",
            "sessions": "sessions of the hour with a reward, or with a missing one",
            "rewards": "steps with a reward",
            "reward_sum": "sum of their newest rewards, to rounding",
            "reward_min": "the smallest of them",
            "reward_max": "the largest of them",
            "missing": "steps whose reward will not come and has not come",
        },
    ),
)


def upgrade() -> None:
    hypertable = bool(
        scalar("select count(*) from pg_extension where extname = 'timescaledb'")
    ) and bool(
        scalar(
            "select count(*) from timescaledb_information.hypertables"
            " where hypertable_name = 'event_log' and hypertable_schema = current_schema()"
        )
    )
    licence = scalar("select current_setting('timescaledb.license', true)")
    run(CHUNKS if hypertable else PARTITIONS)
    run(FINISHED.replace(DROP_PARTITION, DROP_CHUNK) if hypertable else FINISHED)
    if hypertable and licence == "timescale":
        run(COMPRESSION)
        run(CONTINUOUS_AGGREGATE)
        run(REFRESH)
    else:
        run(PLAIN_VIEW)
    run(REWARD_HOURLY)
    for name, comment, columns in VIEWS:
        run(f"comment on view {name} is {literal(comment)}")
        for column, text in columns.items():
            run(f"comment on column {name}.{column} is {literal(text)}")


def scalar(query: str) -> object:
    """The one value of a query."""
    return op.get_bind().exec_driver_sql(query).scalar()


def run(statements: str) -> None:
    """Run statements as they stand: nothing in them is a parameter."""
    op.get_bind().exec_driver_sql(statements.replace("%", "%%"))


def literal(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def downgrade() -> None:
    raise NotImplementedError("the log is append-only: restore a backup instead")
