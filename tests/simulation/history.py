"""The scheduler's queries: the real ones, each statement carried out by a function of its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

from tests.simulation.clock import Process
from tests.simulation.log import Database, Reader, Row, place

from dsec.scheduler import queries
from dsec.scheduler.episodes import CHANGES, ENDED, EPISODES, STEPS
from dsec.scheduler.history import History
from dsec_contracts import keys


class SchedulersHistory(History):
    """The scheduler's queries, with a simulated server behind them."""

    def __init__(self, database: Database, process: Process) -> None:
        self._database = database
        self._process = process
        self._log = Reader(database, process)

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _rows(self, query: Any, parameters: dict[str, Any]) -> list[Any]:
        statement = _STATEMENTS[query]

        def find() -> list[Any]:
            return statement(self._database, parameters)

        return await self._database.ask(self._process, statement.__name__, find)  # type: ignore[no-any-return]


def _code(row: Row | None) -> str | None:
    return None if row is None else json.loads(row["circumstance"] or "{}").get("code")


def _told(row: Row) -> tuple[Any, ...]:
    return (
        row["kind"],
        row["epoch"],
        row["sequence"],
        row["fact"],
        row["circumstance"],
        row["event_time"],
    )


def _upto(row: Row, p: dict[str, Any]) -> bool:
    return (row["epoch"], row["sequence"]) <= (p["epoch"], p["sequence"])


def floor_row(db: Database, p: dict[str, Any]) -> list[Any]:
    """The floor."""
    row = db.floor()
    if row is None:
        return []
    return [(row["epoch"], row["sequence"], row["stream_created"], row["message_time"])]


def parked(db: Database, p: dict[str, Any]) -> list[Any]:
    """All services of a simulation are of one version: there is nothing to put aside."""
    return [(1,)] if db.parked else []


def specs(db: Database, p: dict[str, Any]) -> list[Any]:
    """Hash and kind of every spec, the outside services that it asks, and whether it rewards whole
    episodes."""
    rows = [row for row in db.rows if row["kind"] == "spec.registered"]
    facts = [json.loads(row["fact_json"]) for row in rows]
    told = [json.loads(row["circumstance"] or "{}") for row in rows]
    return [
        (fact["spec_hash"], fact["kind"], said.get("services"), said.get("per_episode"))
        for fact, said in zip(facts, told, strict=True)
    ]


def services(db: Database, p: dict[str, Any]) -> list[Any]:
    """Every declaration of an outside service."""
    return [(row["fact"],) for row in db.rows if row["kind"] == "service.declared"]


def policies(db: Database, p: dict[str, Any]) -> list[Any]:
    """The key of every policy."""
    return [(row["key"],) for row in db.rows if row["kind"] == "policy.published"]


def fences(db: Database, p: dict[str, Any]) -> list[Any]:
    """Fences up to a floor."""
    return [_told(row) for row in db.rows if row["kind"] == "worker.fenced" and _upto(row, p)]


def placed(db: Database, p: dict[str, Any]) -> list[Any]:
    """What was said of sessions that were placed and have not ended."""
    kinds = (
        "session.requested",
        "session.cancel_requested",
        "session.placed",
        "session.released",
        "curriculum.changed",
    )
    begun = {row["session_id"] for row in db.rows if row["key"] == "placed:1"}
    over = {row["session_id"] for row in db.rows if row["key"] == keys.ENDED}
    return [
        _told(row)
        for row in db.rows
        if row["kind"] in kinds
        and row["session_id"] in begun
        and row["session_id"] not in over
        and _upto(row, p)
    ]


def ended_since(db: Database, p: dict[str, Any]) -> list[Any]:
    """Only traces are made of it, and telemetry is off."""
    return []


def waiting(db: Database, p: dict[str, Any]) -> list[Any]:
    """Requests that nothing came of yet."""
    found = []
    for row in sorted(db.rows, key=place):
        if row["kind"] != "session.requested" or not _upto(row, p):
            continue
        if (row["epoch"], row["sequence"]) < (p["from_epoch"], p["from_sequence"]):
            continue
        session_id = UUID(bytes=row["session_id"])
        if db.get(session_id, keys.ENDED) or db.get(session_id, "placed:1"):
            continue
        if db.get(keys.SYSTEM_SESSION, keys.rejected(row["event_id"])):
            continue
        cancel = db.get(session_id, keys.CANCEL_REQUESTED)
        found.append((row["event_id"], row["epoch"], row["sequence"], row["fact"], _code(cancel)))
    return found[: p["limit"]]


def prior(db: Database, p: dict[str, Any]) -> list[Any]:
    """What is known of ids."""
    found = []
    for session_id in p["ids"]:
        for key in (keys.REQUESTED, keys.CANCEL_REQUESTED):
            row = db.get(session_id, key)
            if row is not None:
                refused = db.get(keys.SYSTEM_SESSION, keys.rejected(row["event_id"])) is not None
                at = row["epoch"], row["sequence"]
                found.append((session_id, key, *at, row["fact"], _code(row), refused))
    return found


def tail(db: Database, p: dict[str, Any]) -> list[Any]:
    """How far a session got."""
    rows = [row for row in db.of(p["id"]) if row["kind"] == "session.stepped"]
    started = db.get(p["id"], keys.STARTED)
    last = max(rows, key=lambda row: row["step"], default=None)
    return [
        (
            None if started is None else started["chain"],
            None if last is None else last["chain"],
            len(rows),
            0 if last is None else last["step"] + 1,
            sum(bool(row["terminated"] or row["truncated"]) for row in rows),
        )
    ]


def episodes(db: Database, p: dict[str, Any]) -> list[Any]:
    """The rewards of some steps, by session and episode."""
    found = []
    asked = zip(p["ids"], p["firsts"], p["lasts"], strict=True)
    for session_id, first, last in sorted(asked):
        by_episode: dict[int, list[tuple[Row, Row | None, bool]]] = {}
        for step in range(first, last + 1):
            if (row := db.get(session_id, keys.step(step))) is not None:
                reward = db.get(session_id, keys.reward(step))
                missing = db.get(session_id, keys.reward_missing(step))
                if reward is not None and missing is not None and place(missing) < place(reward):
                    reward = None
                missing = missing if reward is None else None
                by_episode.setdefault(row["episode"], []).append((row, reward, missing is not None))
        for episode, told in sorted(by_episode.items()):
            values = [reward["value"] for _, reward, _ in told if reward is not None]
            last_row = told[-1][0]
            over = last_row["terminated"] or last_row["truncated"]
            end = (*place(last_row), last_row["fact"]) if over else (None,) * 4
            found.append(
                (
                    session_id,
                    episode,
                    len(told),
                    last_row["step"],
                    values,
                    sum(missing for *_, missing in told),
                    *end,
                )
            )
    return found


def ended(db: Database, p: dict[str, Any]) -> list[Any]:
    """The sessions with a curriculum that ended last, the newest ends first."""
    found = []
    for row in sorted(db.rows, key=place, reverse=True):
        if row["kind"] != "session.ended":
            continue
        request = db.get(UUID(bytes=row["session_id"]), keys.REQUESTED)
        asked = {} if request is None else json.loads(request["fact_json"])
        if asked.get("curriculum_level") is not None:
            steps = json.loads(row["fact_json"])["steps"]
            told = asked["agent_spec"], asked["curriculum_level"], asked["reward_fn_hash"]
            found.append((UUID(bytes=row["session_id"]), *place(row), steps, *told))
    return found[: p["sessions"]]


def changes(db: Database, p: dict[str, Any]) -> list[Any]:
    """The levels that sessions were given."""
    return [
        (session_id, fact["n"], fact["level"])
        for session_id in p["ids"]
        for row in db.of(session_id)
        if row["kind"] == "curriculum.changed"
        for fact in [json.loads(row["fact_json"])]
    ]


def steps(db: Database, p: dict[str, Any]) -> list[Any]:
    """How many steps each session has."""
    return [(one, sum(row["kind"] == "session.stepped" for row in db.of(one))) for one in p["ids"]]


_STATEMENTS: dict[Any, Callable[[Database, dict[str, Any]], list[Any]]] = {
    queries.FLOOR: floor_row,
    queries.PARKED: parked,
    queries.SPECS: specs,
    queries.SERVICES: services,
    queries.POLICIES: policies,
    queries.FENCES: fences,
    queries.PLACED: placed,
    queries.ENDED_SINCE: ended_since,
    queries.WAITING: waiting,
    queries.PRIOR: prior,
    queries.TAIL: tail,
    EPISODES: episodes,
    ENDED: ended,
    CHANGES: changes,
    STEPS: steps,
}
