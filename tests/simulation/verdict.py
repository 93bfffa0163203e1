"""What must hold of every run, whatever happened in it: (a), (b) and (c)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from tests.simulation import programs
from tests.simulation.log import log_row, place
from tests.simulation.programs import ONCE_SPEC, outcome_of, undisturbed
from tests.simulation.upstream import Session
from tests.simulation.world import World

from dsec.platform.bus import Message
from dsec.recorder.intake import Reading, Unfit, read, table_of
from dsec.replay.verify import verify
from dsec.session.io import REWARD, REWARD_MISSING
from dsec.session.log_row import LogRow
from dsec.session.program import session_config
from dsec.session.recorded import Recorded
from dsec_contracts import keys
from dsec_contracts.canonical import decode
from dsec_contracts.step import STEP_FIELDS

ONE_WINS = ("session.ended", "session.cancel_requested", "worker.fenced", "curriculum.changed")
"""Of these several may be said of one thing, and the first counts."""
OF_THE_WORLD = ("tool.returned", "tool.failed")
"""What the world says of a call that cannot be repeated: the first answer counts."""


def failures(world: World) -> Iterator[str]:
    """Every way in which a run is wrong."""
    yield from world.errors
    if world.errors:
        return
    yield from _published(world)
    for session in world.sessions:
        yield from (f"{session.request.session_id}: {what}" for what in _session(world, session))
    once = [key for spec, key in world.calls if spec == ONCE_SPEC[0]]
    for key in sorted({key for key in once if once.count(key) > 1}):
        yield f"{key} was called {once.count(key)} times, and its tool is not idempotent"


def _published(world: World) -> Iterator[str]:
    """(a): the log has each published output once, as it was published first."""
    readings: list[Reading] = []
    for stored in world.server.archive:
        if stored.subject.startswith("dsec.fence."):
            continue
        if stored.subject.startswith("dsec.dead."):
            yield f"a dead letter: {stored.headers.get('dead-error')}"
            continue
        time = datetime.fromtimestamp(stored.time_ns / 1e9, UTC)
        raw: Any = None
        reading = read(
            Message(stored.subject, stored.headers, stored.data, stored.sequence, 1, time, raw), 1
        )
        if isinstance(reading, Unfit):
            yield f"{stored.subject} at {stored.sequence} can be no row: {reading.error}"
            continue
        readings.append(reading)
    first: dict[tuple[bytes, str], dict[str, Any]] = {}
    for row in sorted(table_of(readings).to_pylist(), key=place):
        known = first.setdefault((row["session_id"], row["key"]), row)
        if known["fact"] != row["fact"] and not _may_differ(world, row):
            yield f"{_name(row)} was changed: at {known['sequence']} and {row['sequence']}"
    yield from _logged(world, first)


def _logged(world: World, first: dict[tuple[bytes, str], dict[str, Any]]) -> Iterator[str]:
    logged: dict[tuple[bytes, str], dict[str, Any]] = {}
    for row in world.database.rows:
        key = row["session_id"], row["key"]
        if key in logged:
            yield f"{_name(row)} is doubled"
        logged[key] = row
        if key not in first:
            yield f"{_name(row)} was never published"
    for key, row in first.items():
        if key not in logged:
            yield f"{_name(row)}, published at {row['sequence']}, is lost"
        elif logged[key]["fact"] != row["fact"]:
            yield f"{_name(row)} is not what was published first"
    for row, verdict in world.database.aside:
        if verdict == "conflict":
            yield f"{_name(row)} is in conflict"


def _may_differ(world: World, row: dict[str, Any]) -> bool:
    if row["kind"] in ONE_WINS:
        return True
    return row["kind"] in OF_THE_WORLD and any(
        session.request.session_id.bytes == row["session_id"] and not session.kind.repeatable
        for session in world.sessions
    )


def _name(row: dict[str, Any]) -> str:
    return f"{UUID(bytes=row['session_id'])}/{row['key']}"


def _session(world: World, session: Session) -> Iterator[str]:
    request, kind = session.request, session.kind
    rows = [log_row(row) for row in world.database.of(request.session_id)]
    ended = next((row for row in rows if row.key == keys.ENDED), None)
    if ended is None:
        yield f"it has not ended; its last rows: {[row.key for row in rows[-4:]]}"
        return
    code = programs.program(kind)
    verdict = verify(rows, code, session_config(request, code), programs.scorer(kind))
    if not verdict.ok or verdict.reward_ok is False or not verdict.complete:  # (b)
        yield f"it does not verify: {verdict.first_divergence}"
    if session.cancelled:
        return
    told = log_row(world.database.get(request.session_id, keys.ENDED) or {})
    status = _status(told.fact)
    if status != ("completed", "max_steps"):
        yield f"it ended {status}: {told.circumstance}"
    unheard = set(range(request.max_steps)) - set(_rewarded(rows))
    if status == ("completed", "max_steps") and unheard:
        yield f"the rewards of steps {sorted(unheard)} never reached it"
    if kind.repeatable and outcome_of(rows) != undisturbed(kind, request.seed, request.max_steps):
        yield "chain or rewards are not those of an undisturbed run"  # (c)


def _rewarded(rows: list[LogRow]) -> Iterator[int]:
    """The steps whose reward, or that there is none, some output names."""
    recorded = Recorded.from_rows(rows)
    named = [decode(step.fact)[STEP_FIELDS.index("inputs")] for step in recorded.steps]
    if recorded.ended is not None:
        named.append(decode(recorded.ended.inputs))
    for kind, ordinal, _ in itertools.chain.from_iterable(named):
        if kind in (REWARD, REWARD_MISSING):
            yield ordinal


def _status(fact: bytes) -> tuple[str, str]:
    value = decode(fact)
    return value["status"], value["code"]
