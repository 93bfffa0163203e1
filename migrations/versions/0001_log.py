"""The log: its tables, and what makes its partitions.

Where the server has TimescaleDB, `event_log` is a hypertable, otherwise PostgreSQL partitions it
natively: decided once, here, when the log is made. A log that has rows is never turned round.
"""

from __future__ import annotations

import logging

from alembic import op
from sqlalchemy import Connection
from sqlalchemy.exc import ProgrammingError

log = logging.getLogger("dsec.migrations")

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

INSUFFICIENT_PRIVILEGE = "42501"

# column, type, comment
ROW = (
    (
        "session_id",
        "uuid not null",
        "the session; events about none have the system session's id",
    ),
    (
        "session_at",
        "timestamptz not null",
        "the time in the session's id; the partition column",
    ),
    ("sequence", "bigint not null", "position in the stream, within its epoch"),
    (
        "value",
        "double precision",
        "reward of a reward row, the environment's own reward of a step",
    ),
    ("event_time", "timestamptz not null", "when the event was made, as its producer says"),
    (
        "epoch",
        "integer not null",
        "which stream the sequence counts in; a new stream is a new epoch",
    ),
    ("index", "integer not null", "row within its message, from 0"),
    ("step", "integer", "environment step the row is about, from 0 over the session"),
    ("episode", "integer", "episode of a step, from 0"),
    ("attempt", "integer", "placement under which it was made, from 1"),
    ("version", "smallint not null", "version of the event type"),
    ("terminated", "boolean", "of a step: the environment ended the episode"),
    ("truncated", "boolean", "of a step: the environment cut the episode short"),
    ("kind", "text not null", "event name, such as session.stepped"),
    ("key", 'text collate "C" not null', "natural key within the session, such as step:7"),
    ("chain", "bytea", "chain hash after a step; chain_0 of a start; last of an end"),
    ("fact", "bytea not null", "canonical bytes of the fact: the truth of the row"),
    ("observation", "bytea", "canonical observation after a step or the first reset"),
    ("reset_observation", "bytea", "canonical first observation of the next episode"),
    ("extras", "bytea", "canonical extras of a step: recorded, not hashed"),
    ("policy", "text", "name@version of the weights that chose the action, or asked for"),
    ("cause", "text", "key of the cause; <session id>/<key> where it is another session's"),
    (
        "circumstance",
        "json",
        "what is never compared; of a message of columns it stands on its first row",
    ),
    ("fact_json", "json", "the fact for queries, not faithful; null for rows of columns"),
    ("event_id", "text not null", "ce-id of the message"),
)
ASIDE = (
    (
        "verdict",
        "text not null",
        "conflict: a re-executed output differs; superseded: a later input or end",
    ),
    ("kept_epoch", "integer not null", "epoch of the row that is kept"),
    ("kept_sequence", "bigint not null", "sequence of the kept row"),
    ("kept_index", "integer not null", "index of the kept row"),
)
PARKED = (
    ("epoch", "integer not null", "epoch of the message's position"),
    ("sequence", "bigint not null", "its position in the stream"),
    ("subject", "text not null", "the subject it came on"),
    ("event_type", "text not null", "its type, unknown when it came"),
    ("headers", "json not null", "its headers"),
    ("body", "bytea not null", "its body, byte for byte"),
)
FLOOR = (
    ("epoch", "integer not null", "from 1"),
    ("stream_created", "timestamptz not null", "when the epoch's stream was made"),
    ("sequence", "bigint not null", "all up to here is committed"),
    (
        "message_time",
        "timestamptz",
        "when the stream took the message at the floor: tells a stream that was set back",
    ),
    (
        "placements_trimmed",
        "bigint not null default 0",
        "placements of sessions that ended up to here are gone from the stream",
    ),
)
LIVE = (
    ("session_id", "uuid not null", "the session"),
    ("attempt", "integer not null", "its placement, from 1"),
    ("worker", "text not null", "the worker that hosts it"),
    ("step", "integer not null", "steps it has taken"),
    ("waiting_on", "text not null", "tick, reward, log, start"),
    ("heartbeat_at", "timestamptz not null", "when its worker said so"),
)

SESSION_TIME = """
create function session_time(id uuid) returns timestamptz
language sql immutable strict parallel safe
as $$
    -- The first 48 bits of a UUIDv7 are its milliseconds since 1970.
    select timestamptz '1970-01-01 00:00:00+00' + interval '1 millisecond'
        * ('x' || translate(left(id::text, 13), '-', ''))::bit(48)::bigint::double precision
$$;
comment on function session_time(uuid) is
    'the time in a session id; with it, `session_at = session_time(id)` finds the one partition';
"""

PARTITIONS = """
create function event_log_partition(at timestamptz, partitions_max integer) returns boolean
language plpgsql
as $$
declare
    first_day timestamp := date_trunc('month', at at time zone 'UTC');
    name text := 'event_log_' || to_char(first_day, 'YYYYMM');
    present integer;
begin
    if to_regclass(format('%I', name)) is not null then
        return true;
    end if;
    select count(*) into present from pg_inherits where inhparent = 'event_log'::regclass;
    if present >= partitions_max then
        return false;
    end if;
    -- Made aside and attached: that locks the parent less than making it in place.
    execute format('create table %I (like event_log including all)', name);
    -- Rows up to a page stay in the table: compressing them took longer than writing them.
    execute format('alter table %I set (toast_tuple_target = 8160)', name);
    execute format(
        'alter table event_log attach partition %I for values from (%L) to (%L)',
        name, first_day || '+00', (first_day + interval '1 month') || '+00');
    return true;
exception when check_violation then
    -- Sessions of that month already lie in the default partition; there they stay.
    return false;
end
$$;

create table event_log_default partition of event_log default;
alter table event_log_default set (toast_tuple_target = 8160);
select event_log_partition('2020-01-01 00:00:00+00', 2);

comment on function event_log_partition(timestamptz, integer) is
    'make the monthly partition of a time; false where it cannot be and the default one serves';
"""

# About the month that native partitions have. Planning a query that names no time costs two
# milliseconds a chunk (a row of `session_summary`: 1.1 s over ten years of weekly chunks), and ten
# years, which is what ids may carry, are 122 of these. Ids grow with time, so inserts touch only
# the end of a chunk's index, and its size sets no bound; what does is that one session which stays
# open keeps its chunk from retention and compression. No index on `session_at` alone: the unique
# key finds a session's rows, and ranges of time are ranges of chunks.
HYPERTABLE = """
-- Rows up to a page stay in the table: compressing them took longer than writing them.
alter table event_log set (toast_tuple_target = 8160);
select create_hypertable(
    'event_log', by_range('session_at', interval '30 days'), create_default_indexes => false);

create function event_log_partition(at timestamptz, partitions_max integer) returns boolean
language sql
as $$ select true $$;
comment on function event_log_partition(timestamptz, integer) is
    'does nothing: a hypertable makes its chunks by itself';
"""


def upgrade() -> None:
    hypertable = has_timescale(op.get_bind())
    table(
        "event_log",
        ROW,
        "the log: every event of every session, once",
        None,
        "" if hypertable else "partition by range (session_at)",
    )
    op.execute("alter table event_log add constraint event_log_key "
               "unique (session_id, session_at, key)")  # fmt: skip
    op.execute(
        "create index event_log_cold on event_log (kind, epoch, sequence) where step is null"
    )
    table(
        "event_aside",
        ROW + ASIDE,
        "facts that came under a key which the log already has with another fact",
        'session_id, key, epoch, sequence, "index"',
    )
    table(
        "event_parked",
        PARKED,
        "messages of event types newer than the recorder; logged after its upgrade",
        "epoch, sequence",
    )
    table(
        "log_floor",
        FLOOR,
        "how far the log has the stream; the row of the highest epoch is the floor",
        "epoch",
    )
    table("session_live", LIVE, "what runs now, from heartbeats; never folded", "session_id")
    partitions = HYPERTABLE if hypertable else PARTITIONS
    op.get_bind().exec_driver_sql((SESSION_TIME + partitions).replace("%", "%%"))


def has_timescale(connection: Connection) -> bool:
    """Whether TimescaleDB is in this database, or could be brought into it and now is."""
    installed = "select 1 from pg_extension where extname = 'timescaledb'"
    if connection.exec_driver_sql(installed).scalar():
        return True
    # Where its loader does not run, making the extension would end the connection; the loader's
    # setting is visible to every user, the list of preloaded libraries is not.
    loaded = connection.exec_driver_sql(
        "select 1 from pg_available_extensions where name = 'timescaledb'"
        " and current_setting('timescaledb.disable_load', true) is not null"
    ).scalar()
    if not loaded:
        return False
    try:
        with connection.begin_nested():
            connection.exec_driver_sql("create extension timescaledb")
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) != INSUFFICIENT_PRIVILEGE:
            raise
        log.warning(
            "this server has TimescaleDB and this user may not use it, so the log is partitioned "
            "natively, for good; to have a hypertable, let an administrator run `create extension "
            "timescaledb` in an empty database, and start anew with that"
        )
        return False
    return True


def table(
    name: str,
    columns: tuple[tuple[str, str, str], ...],
    comment: str,
    key: str | None,
    partitioned: str = "",
) -> None:
    """Make a table with a comment on it and on each of its columns."""
    lines = [f'"{column}" {kind}' for column, kind, _ in columns]
    if key is not None:
        lines.append(f"constraint {name}_key primary key ({key})")
    op.execute(f"create table {name} ({', '.join(lines)}) {partitioned}")
    comment_on(f"table {name}", comment)
    for column, _, text in columns:
        comment_on(f'column {name}."{column}"', text)


def comment_on(what: str, text: str) -> None:
    """Write a comment into the catalogue."""
    quoted = text.replace("'", "''")
    op.get_bind().exec_driver_sql(f"comment on {what} is '{quoted}'")


def downgrade() -> None:
    raise NotImplementedError("the log is append-only: restore a backup instead")
