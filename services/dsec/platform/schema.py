"""The tables of the log, as the code knows them. The migrations make them; a test compares both.

`event_log` is partitioned by the time that a session's id carries, so that all rows of a session
lie in one partition and its unique key is one over the whole log. That key contains the partition
column and nothing points at the table with a foreign key, so the same table can be a hypertable.
Fixed-width columns come first, so that no padding is stored between them.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

metadata = MetaData()

_TEXT_KEY = Text(collation="C")  # ranges of keys (`step:` to `step;`) need the order of bytes
_TIME = DateTime(timezone=True)

# name, type, nullable, comment
_ROW: tuple[tuple[str, Any, bool, str], ...] = (
    ("session_id", Uuid(), False, "the session; events about none have the system session's id"),
    ("session_at", _TIME, False, "the time in the session's id; the partition column"),
    ("sequence", BigInteger(), False, "position in the stream, within its epoch"),
    ("value", Double(), True, "reward of a reward row, the environment's own reward of a step"),
    ("event_time", _TIME, False, "when the event was made, as its producer says"),
    ("epoch", Integer(), False, "which stream the sequence counts in; a new stream is a new epoch"),
    ("index", Integer(), False, "row within its message, from 0"),
    ("step", Integer(), True, "environment step the row is about, from 0 over the session"),
    ("episode", Integer(), True, "episode of a step, from 0"),
    ("attempt", Integer(), True, "placement under which it was made, from 1"),
    ("version", SmallInteger(), False, "version of the event type"),
    ("terminated", Boolean(), True, "of a step: the environment ended the episode"),
    ("truncated", Boolean(), True, "of a step: the environment cut the episode short"),
    ("kind", Text(), False, "event name, such as session.stepped"),
    ("key", _TEXT_KEY, False, "natural key within the session, such as step:7"),
    ("chain", LargeBinary(), True, "chain hash after a step; chain_0 of a start; last of an end"),
    ("fact", LargeBinary(), False, "canonical bytes of the fact: the truth of the row"),
    ("observation", LargeBinary(), True, "canonical observation after a step or the first reset"),
    ("reset_observation", LargeBinary(), True, "canonical first observation of the next episode"),
    ("extras", LargeBinary(), True, "canonical extras of a step: recorded, not hashed"),
    ("policy", Text(), True, "name@version of the weights that chose the action, or asked for"),
    ("cause", Text(), True, "key of the cause; <session id>/<key> where it is another session's"),
    (
        "circumstance",
        JSON(),
        True,
        "what is never compared; of a message of columns it stands on its first row",
    ),
    ("fact_json", JSON(), True, "the fact for queries, not faithful; null for rows of columns"),
    ("event_id", Text(), False, "ce-id of the message"),
)


def _row_columns() -> list[Column[Any]]:
    return [
        Column(name, kind, nullable=nullable, comment=comment)
        for name, kind, nullable, comment in _ROW
    ]


ROW_COLUMNS = tuple(name for name, _, _, _ in _ROW)

event_log = Table(
    "event_log",
    metadata,
    *_row_columns(),
    UniqueConstraint("session_id", "session_at", "key", name="event_log_key"),
    Index("event_log_cold", "kind", "epoch", "sequence", postgresql_where=text("step IS NULL")),
    comment="the log: every event of every session, once",
    postgresql_partition_by="RANGE (session_at)",
)

event_aside = Table(
    "event_aside",
    metadata,
    *_row_columns(),
    Column(
        "verdict",
        Text(),
        nullable=False,
        comment="conflict: a re-executed output differs; superseded: a later input or end",
    ),
    Column("kept_epoch", Integer(), nullable=False, comment="epoch of the row that is kept"),
    Column("kept_sequence", BigInteger(), nullable=False, comment="sequence of the kept row"),
    Column("kept_index", Integer(), nullable=False, comment="index of the kept row"),
    PrimaryKeyConstraint("session_id", "key", "epoch", "sequence", "index", name="event_aside_key"),
    comment="facts that came under a key which the log already has with another fact",
)

event_parked = Table(
    "event_parked",
    metadata,
    Column("epoch", Integer(), nullable=False, comment="epoch of the message's position"),
    Column("sequence", BigInteger(), nullable=False, comment="its position in the stream"),
    Column("subject", Text(), nullable=False, comment="the subject it came on"),
    Column("event_type", Text(), nullable=False, comment="its type, unknown when it came"),
    Column("headers", JSON(), nullable=False, comment="its headers"),
    Column("body", LargeBinary(), nullable=False, comment="its body, byte for byte"),
    PrimaryKeyConstraint("epoch", "sequence", name="event_parked_key"),
    comment="messages of event types newer than the recorder; logged after its upgrade",
)

log_floor = Table(
    "log_floor",
    metadata,
    Column("epoch", Integer(), nullable=False, autoincrement=False, comment="from 1"),
    Column("stream_created", _TIME, nullable=False, comment="when the epoch's stream was made"),
    Column("sequence", BigInteger(), nullable=False, comment="all up to here is committed"),
    Column(
        "message_time",
        _TIME,
        nullable=True,
        comment="when the stream took the message at the floor: tells a stream that was set back",
    ),
    Column(
        "placements_trimmed",
        BigInteger(),
        nullable=False,
        server_default=text("0"),
        comment="placements of sessions that ended up to here are gone from the stream",
    ),
    PrimaryKeyConstraint("epoch", name="log_floor_key"),
    comment="how far the log has the stream; the row of the highest epoch is the floor",
)

session_live = Table(
    "session_live",
    metadata,
    Column("session_id", Uuid(), nullable=False, comment="the session"),
    Column("attempt", Integer(), nullable=False, comment="its placement, from 1"),
    Column("worker", Text(), nullable=False, comment="the worker that hosts it"),
    Column("step", Integer(), nullable=False, comment="steps it has taken"),
    Column("waiting_on", Text(), nullable=False, comment="tick, reward, log, start"),
    Column("heartbeat_at", _TIME, nullable=False, comment="when its worker said so"),
    PrimaryKeyConstraint("session_id", name="session_live_key"),
    comment="what runs now, from heartbeats; never folded",
)
