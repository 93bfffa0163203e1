"""How fast the recorder's writer alone is: messages in memory to committed rows.

Half of the rows are steps, half their rewards, as lanes and the reward service publish them. Runs
on a PostgreSQL of its own, or on the one given. `--json` prints one object with stable keys.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import psycopg
import uvloop

from dsec.platform.bus import Message
from dsec.platform.db import libpq_url
from dsec.platform.migrations import migrate
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.postgres import PostgresOptions, prepare_postgres
from dsec.platform.stack.process import ChildProcess
from dsec.recorder.intake import read, table_of
from dsec.recorder.writer import Commit, Floor, Writer, encode
from dsec_contracts import Envelope, Event, RewardScored, SessionStepped, canonical
from dsec_contracts.columns import VarColumn
from dsec_contracts.reward import RewardColumns
from dsec_contracts.step import StepColumns

OBSERVATION = canonical.encode([0.1, 0.2, 0.3, 0.4])


@dataclass(slots=True)
class Result:
    """What a run measured. Times are of this process: client CPU is what it burnt."""

    rows: int
    seconds: float
    rows_per_s: float
    client_cpu_us_per_row: float
    read_us_per_row: float
    table_us_per_row: float
    encode_us_per_row: float
    bytes_per_row: float


def messages(
    lanes: int, rows: int, tick: int, sessions: list[list[UUID]]
) -> list[tuple[str, Event]]:
    """One tick of every lane: its steps and their rewards."""
    result: list[tuple[str, Event]] = []
    for lane in range(lanes):
        ids = b"".join(s.bytes for s in sessions[lane])
        ints = struct.pack(f"<{rows}i", *[tick] * rows)
        floats = struct.pack(f"<{rows}d", *[1.0] * rows)
        fact = canonical.encode(
            [tick, 0, [["reward", tick, b"h" * 16]], [], 1, None, 1.0, False, False, {},
             b"s" * 16, b"o" * 16, None]
        )  # fmt: skip
        scored = canonical.encode([tick, 1, 1.0, {"env": [1.0, 1.0]}, b"c" * 16])
        empty = VarColumn.pack([b""] * rows)
        step = StepColumns(
            session_id=ids, attempt=ints, step=ints, episode=ints, env_reward=floats,
            terminated=bytes(rows), truncated=bytes(rows), chain=os.urandom(32 * rows),
            fact=VarColumn.pack([fact] * rows),
            cause=VarColumn.pack([f"reward:{tick}.1".encode()] * rows),
            observation=VarColumn.pack([OBSERVATION] * rows), prior=empty,
            reset_observation=empty, extras=empty, policy=empty,
        )  # fmt: skip
        reward = RewardColumns(
            session_id=ids, step=ints, revision=struct.pack(f"<{rows}i", *[1] * rows),
            value=floats, cause=os.urandom(16 * rows), fact=VarColumn.pack([scored] * rows),
        )  # fmt: skip
        result.append((f"dsec.session.stepped.l{lane}", SessionStepped(rows=rows, row=step)))
        result.append((f"dsec.reward.scored.l{lane}", RewardScored(rows=rows, row=reward)))
    return result


def wire(events: list[tuple[str, Event]], sequence: int, now: datetime) -> list[Message]:
    """Events as they come from the bus."""
    result = []
    for n, (subject, event) in enumerate(events):
        envelope = Envelope(str(UUID(int=sequence + n)), event.event_type(), "load", now)
        raw = None
        result.append(
            Message(subject, envelope.headers(), event.body(), sequence + n, 1, now, raw)  # type: ignore[arg-type]
        )
    return result


async def measure(database_url: str, *, ticks: int, lanes: int, rows: int, batch: int) -> Result:
    """Write `ticks` ticks of `lanes` lanes of `rows` sessions."""
    migrate(database_url)
    now = datetime.now(UTC)
    ms = int(now.timestamp() * 1000)
    sessions = [
        [UUID(int=ms << 80 | 7 << 76 | 2 << 62 | int.from_bytes(os.urandom(7)))
         for _ in range(rows)] for _ in range(lanes)
    ]  # fmt: skip
    incoming: list[Message] = []
    for tick in range(ticks):
        incoming += wire(messages(lanes, rows, tick, sessions), len(incoming) + 1, now)
    writer = await Writer.connect(database_url)
    await writer.start_epoch(Floor(1, now, 0, None))
    await writer.ensure_partition(now, 240)
    spent = dict.fromkeys(("read", "table", "encode"), 0.0)
    total = 0
    start, cpu = time.perf_counter(), time.process_time()
    for at in range(0, len(incoming), batch):
        part = incoming[at : at + batch]
        t0 = time.process_time()
        readings = [read(message, 1) for message in part]
        t1 = time.process_time()
        table = table_of(readings)
        t2 = time.process_time()
        await writer.append(Commit(1, table, (), part[-1].sequence, now))
        spent["read"] += t1 - t0
        spent["table"] += t2 - t1
        total += table.num_rows
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    t0 = time.process_time()
    encode(table)
    spent["encode"] = (time.process_time() - t0) / table.num_rows * total
    await writer.close()
    with psycopg.connect(libpq_url(database_url)) as connection:
        size = connection.execute(
            "select sum(pg_total_relation_size(inhrelid)) from pg_inherits"
            " where inhparent = 'event_log'::regclass"
        ).fetchone()
    assert size is not None
    return Result(
        rows=total,
        seconds=seconds,
        rows_per_s=total / seconds,
        client_cpu_us_per_row=cpu / total * 1e6,
        read_us_per_row=spent["read"] / total * 1e6,
        table_us_per_row=spent["table"] / total * 1e6,
        encode_us_per_row=spent["encode"] / total * 1e6,
        bytes_per_row=float(size[0]) / total,
    )


async def run(options: argparse.Namespace) -> Result:
    """Measure on the database given, or on one of our own."""
    arguments = {name: getattr(options, name) for name in ("ticks", "lanes", "rows", "batch")}
    if options.database_url:
        return await measure(options.database_url, **arguments)
    with tempfile.TemporaryDirectory() as folder:
        server_options = PostgresOptions(
            directory=Path(folder, "pg"), log_path=Path(folder, "pg.log"), port=free_port(),
            password="load",
        )  # fmt: skip
        server = ChildProcess(await prepare_postgres(server_options))
        await server.wait_ready()
        try:
            return await measure(server_options.url, **arguments)
        finally:
            await server.stop()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database-url", default="", help="an empty database; default: own server")
    parser.add_argument("--ticks", type=int, default=400)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--rows", type=int, default=128, help="sessions a lane")
    parser.add_argument("--batch", type=int, default=64, help="messages a commit")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = uvloop.run(run(options))
    if options.json:
        print(json.dumps(asdict(result)))
        return
    for name, value in asdict(result).items():
        print(f"{name:>24} {value:,.2f}")


if __name__ == "__main__":
    main()
