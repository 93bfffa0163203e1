"""What earlier versions left behind, each in a folder that `record.py` wrote."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from alembic import command
from psycopg import sql

from dsec.platform.bus import Bus
from dsec.platform.migrations import _migration
from dsec.session.log_row import LogRow

VERSIONS = sorted(path.parent.name for path in Path(__file__).parent.glob("*/about.json"))
BYTES = ("chain", "fact", "observation", "reset_observation", "extras")
OF_THE_MESSAGE = ("Nats-Msg-Id",)
"""The only one of the server's own headers that a message is published with again."""


@dataclass(frozen=True)
class Message:
    """A message of the stream."""

    sequence: int
    subject: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Recorded:
    """What one version left behind. `rows`: of `event_log`, every column by name."""

    revision: str
    sessions: list[dict[str, Any]]
    messages: list[Message]
    heartbeats: list[Message]
    rows: list[dict[str, Any]]
    floor: dict[str, Any]

    def log_rows(self, session_id: str) -> list[LogRow]:
        """The rows of a session, as every reader gets them."""
        return [
            LogRow(**{name: row[name] for name in LogRow._fields})
            for row in self.rows
            if row["session_id"] == UUID(session_id)
        ]

    def of_case(self, case: str) -> list[dict[str, Any]]:
        """What the sessions of a case came to."""
        return [one for one in self.sessions if one["case"] == case]

    async def publish(self, bus: Bus, upto: int) -> None:
        """Fill an empty stream with the messages up to a sequence, each under its own."""
        for message in self.messages:
            if message.sequence > upto:
                return
            headers = {
                name: value
                for name, value in message.headers.items()
                if not name.startswith("Nats-") or name in OF_THE_MESSAGE
            }
            taken = await bus.publish_raw(message.subject, message.body, headers)
            assert taken == message.sequence

    def insert(self, connection: psycopg.Connection[Any], upto: int) -> None:
        """The rows of the messages up to a sequence, as that version's recorder left them."""
        names = list(self.rows[0])
        insert = sql.SQL("insert into event_log ({}) values ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, names)),
            sql.SQL(", ").join([sql.Placeholder()] * len(names)),
        )
        for row in self.rows:
            if row["sequence"] <= upto:
                connection.execute(insert, list(row.values()))

    def set_floor(
        self,
        connection: psycopg.Connection[Any],
        sequence: int,
        stream_created: datetime,
        message_time: datetime | None,
    ) -> None:
        """Say up to where the rows of the stream are there."""
        connection.execute(
            "insert into log_floor (epoch, stream_created, sequence, message_time)"
            " values (1, %s, %s, %s)",
            (stream_created, sequence, message_time),
        )


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    text = gzip.decompress((folder / f"{name}.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def _message(line: dict[str, Any]) -> Message:
    body = base64.b64decode(line["body"])
    return Message(line.get("sequence", 0), line["subject"], line["headers"], body)


def _row(line: dict[str, Any]) -> dict[str, Any]:
    row = dict(line)
    for name in BYTES:
        row[name] = None if row[name] is None else base64.b64decode(row[name])
    for name in ("session_at", "event_time"):
        row[name] = datetime.fromisoformat(row[name])
    row["session_id"] = UUID(row["session_id"])
    return row


@pytest.fixture(scope="session", params=VERSIONS)
def recorded(request: pytest.FixtureRequest) -> Recorded:
    """What a version left behind."""
    folder = Path(__file__).parent / request.param
    about = json.loads((folder / "about.json").read_text())
    assert not _lines(folder, "event_aside"), "a sound version puts nothing aside"
    return Recorded(
        about["revision"],
        about["sessions"],
        [_message(line) for line in _lines(folder, "stream")],
        [_message(line) for line in _lines(folder, "heartbeats")],
        sorted(
            (_row(line) for line in _lines(folder, "event_log")),
            key=lambda row: (row["epoch"], row["sequence"], row["index"]),
        ),
        _lines(folder, "log_floor")[0],
    )


def migrate_to(database_url: str, revision: str) -> None:
    """The schema as a version's migrations left it."""
    with _migration(database_url) as (connection, config):
        command.upgrade(config, revision)
        connection.commit()
