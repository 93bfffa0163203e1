"""Events folded a second, beside reading the same rows from PostgreSQL and doing nothing.

    python loadtests/replay.py --json
    DSEC_DATABASE_URL=postgresql://… python loadtests/replay.py --json

The rows are those of real sessions, written to the log's own table. A round reads every session
through the driver and drops the records; then it reads them through the log's reader and folds
them. The ratio is the median over the rounds of the two times of a round, since a machine's speed
drifts: at 0.5 a fold costs as much as the reading. Without DSEC_DATABASE_URL an embedded server is
started; with it, a database of its own is made there and dropped again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import uuid_utils

from dsec.platform import log as reading
from dsec.platform.log import LogReader
from dsec.platform.migrations import migrate
from dsec.platform.stack.ports import free_port
from dsec.platform.stack.postgres import PostgresOptions, prepare_postgres
from dsec.platform.stack.process import ChildProcess
from dsec.replay.fold import fold
from dsec.reward.score import EnvScorer
from dsec.session.documents import AgentDocument, EnvDocument
from dsec.session.io import SessionConfig
from dsec.session.local import local_program, run_in_memory
from dsec.session.log_row import LogRow
from dsec_contracts.keys import session_time

AGENT = b"""
class Agent:
    def __init__(self, config):
        self.space = config["action_space"]
    def step(self, observation):
        return {"action": self.space.sample()}
"""
RATIO_MIN = 0.5
COLUMNS = (
    *("session_id", "session_at", "sequence", "value", "event_time", "epoch", "index", "step"),
    *("episode", "attempt", "version", "terminated", "truncated", "kind", "key", "chain", "fact"),
    *("observation", "reset_observation", "extras", "policy", "cause", "circumstance", "event_id"),
)


@contextlib.asynccontextmanager
async def database() -> AsyncIterator[str]:
    """The URL of an empty database."""
    given = os.environ.get("DSEC_DATABASE_URL")
    if given:
        name = f"dsec_replay_{uuid.uuid4().hex[:12]}"
        connection = await asyncpg.connect(given)
        await connection.execute(f'create database "{name}"')
        try:
            yield urlunsplit(urlsplit(given)._replace(path=f"/{name}"))
        finally:
            await connection.execute(f'drop database if exists "{name}" with (force)')
            await connection.close()
        return
    with tempfile.TemporaryDirectory(prefix="dsec-replay-") as folder:
        options = PostgresOptions(
            directory=Path(folder) / "server",
            log_path=Path(folder) / "postgres.log",
            port=free_port(),
            password=uuid.uuid4().hex,
        )
        child = ChildProcess(await prepare_postgres(options))
        try:
            await child.wait_ready()
            yield options.url
        finally:
            await child.stop()


def sessions(count: int, steps: int) -> dict[uuid.UUID, list[LogRow]]:
    """The logs of `count` sessions of CartPole."""
    program = local_program(
        AgentDocument(entry="agent.py:Agent"),
        {"agent.py": AGENT},
        EnvDocument(entry="gymnasium:CartPole-v1"),
        {},
    )
    result = {}
    for seed in range(count):
        session_id = uuid.UUID(str(uuid_utils.uuid7()))
        config = SessionConfig(seed, steps)
        result[session_id] = run_in_memory(program, config, session_id, EnvScorer())
    return result


async def write(url: str, logs: dict[uuid.UUID, list[LogRow]]) -> None:
    """Put the rows into the log, as a lane would: the sessions' rows interleaved."""
    longest = max(map(len, logs.values()))
    rows = [log[n] for n in range(longest) for log in logs.values() if n < len(log)]
    connection = await asyncpg.connect(url)
    await connection.copy_records_to_table(
        "event_log", columns=COLUMNS, records=[_record(row) for row in rows]
    )
    await connection.execute("vacuum analyze event_log")
    await connection.close()


def _record(row: LogRow) -> tuple[object, ...]:
    given = {
        "session_at": session_time(row.session_id),
        "circumstance": None if row.circumstance is None else json.dumps(row.circumstance),
    }
    return tuple(given[name] if name in given else getattr(row, name) for name in COLUMNS)


async def measure(url: str, logs: dict[uuid.UUID, list[LogRow]], rounds: int) -> dict[str, object]:
    """Read, and read and fold, in turn."""
    reader = await LogReader.connect(url)
    connection = await asyncpg.connect(url)
    query = reading._ROWS + reading._ORDER
    events = sum(map(len, logs.values()))
    read_s, fold_s = [], []
    for n in range(rounds + 1):
        began = time.perf_counter()
        for session_id in logs:
            await connection.fetch(query, session_id, session_time(session_id))
        read = time.perf_counter() - began
        began = time.perf_counter()
        for session_id, log in logs.items():
            state = fold(await reader.rows(session_id))
            if not state.intact or state.chain != log[-1].chain:
                raise SystemExit(f"{session_id} does not fold to its hash: {state.fault}")
        folded = time.perf_counter() - began
        if n:  # the first round warms both up
            read_s.append(read)
            fold_s.append(folded)
    alone = [await _alone(reader, logs) for _ in range(rounds)]
    await connection.close()
    await reader.close()
    ratio = statistics.median(r / f for r, f in zip(read_s, fold_s, strict=True))
    return {
        "ok": ratio >= RATIO_MIN,
        "sessions": len(logs),
        "events": events,
        "fold_events_per_s": round(events / statistics.median(fold_s)),
        "read_events_per_s": round(events / statistics.median(read_s)),
        "ratio": round(ratio, 3),
        "fold_alone_us": round(1e6 * statistics.median(alone) / events, 3),
    }


async def _alone(reader: LogReader, logs: dict[uuid.UUID, list[LogRow]]) -> float:
    """The seconds that folding takes of rows that are at hand."""
    total = 0.0
    for session_id in logs:
        rows = await reader.rows(session_id)
        began = time.perf_counter()
        fold(rows)
        total += time.perf_counter() - began
    return total


async def run(arguments: argparse.Namespace) -> int:
    async with database() as url:
        await asyncio.to_thread(migrate, url)
        logs = await asyncio.to_thread(sessions, arguments.sessions, arguments.steps)
        await write(url, logs)
        result = await measure(url, logs, arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:20} {value}")
    return 0 if result["ok"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
