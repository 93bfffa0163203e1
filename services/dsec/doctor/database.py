"""A PostgreSQL: its version, what it promises at a power failure, TimescaleDB, and its clock."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError

from dsec.doctor.binaries import POSTGRES_KNOWN_MAX, POSTGRES_MIN
from dsec.doctor.clock import Drift, drift_finding
from dsec.doctor.finding import Finding, Unseen
from dsec.doctor.hiding import Hidden, shown
from dsec.doctor.servers import Asked
from dsec.platform.database_facts import DatabaseFacts
from dsec.platform.db import DatabaseError

CONNECTIONS_GOOD = 50
_COMMUNITY = "timescale"


def server(asked: Asked) -> Finding:
    """Whether it answers, is of a known version, and can hold the log."""
    url = asked.servers.database_url
    if url is None:
        raise Unseen("No PostgreSQL is given, and no stack runs here: `dsec up` starts one.")
    try:
        facts = asked.database()
    except (SQLAlchemyError, DatabaseError, ValueError) as error:
        detail = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
        told = Hidden([url]).hide(detail.splitlines()[-1])
        return Finding(
            "fail",
            f"No PostgreSQL that lets us in answers at {shown(url)} ({told}).",
            "Start it, or correct DSEC_DATABASE_URL: host, port, user, password and database.",
            {"url": shown(url)},
        )
    version = facts.settings["server_version"]
    told = f"PostgreSQL {version} at {shown(url)}"
    connections = int(facts.settings["max_connections"])
    seen = {
        "url": shown(url),
        "version": version,
        "encoding": facts.settings["server_encoding"],
        "max_connections": connections,
        "in_recovery": facts.in_recovery,
        "may_create": facts.may_create,
    }
    wrong = _unusable(facts)
    if wrong is not None:
        return Finding("fail", f"{told} {wrong[0]}.", wrong[1], seen)
    if int(facts.settings["server_version_num"]) // 10_000 > POSTGRES_KNOWN_MAX:
        return Finding(
            "warn",
            f"{told} is newer than any that DSec is tested with ({POSTGRES_KNOWN_MAX}).",
            "Try `dsec demo` on it before anything that matters.",
            seen,
        )
    if connections < CONNECTIONS_GOOD:
        return Finding(
            "warn",
            f"{told} allows {connections} connections.",
            f"Set max_connections to {CONNECTIONS_GOOD} or more: every worker has a few.",
            seen,
        )
    return Finding("ok", f"{told}.", "", seen)


def _unusable(facts: DatabaseFacts) -> tuple[str, str] | None:
    """Why the log cannot live there, and what to do; None if it can."""
    settings = facts.settings
    if int(settings["server_version_num"]) // 10_000 < POSTGRES_MIN[0]:
        return "is too old", f"Upgrade it to {POSTGRES_MIN[0]} or newer."
    if facts.in_recovery:
        return "is a standby and takes no writes", "Give the URL of the primary."
    if settings["server_encoding"] != "UTF8":
        return (
            f"stores text as {settings['server_encoding']}",
            "Make the database with `encoding 'UTF8'`.",
        )
    if not facts.may_create and not facts.has_log:  # where it is, a client need not make it
        return (
            "does not let this user make tables",
            "Grant it: `grant create on schema public to …`.",
        )
    return None


def durability(asked: Asked) -> Finding:
    """Whether a committed row is on the disk."""
    settings = asked.seen_database().settings
    seen = {name: settings[name] for name in ("fsync", "full_page_writes", "synchronous_commit")}
    seen["wal_level"] = settings["wal_level"]
    off = [
        name for name in ("fsync", "full_page_writes", "synchronous_commit") if not _on(seen[name])
    ]
    if off:
        return Finding(
            "fail",
            f"A power failure can lose or damage committed rows: {', '.join(off)} off.",
            f"Set {' and '.join(f'{name} = on' for name in off)}: the log is the truth.",
            seen,
        )
    return Finding(
        "ok",
        f"A committed row is on the disk (fsync {seen['fsync']}, synchronous_commit "
        f"{seen['synchronous_commit']}, wal_level {seen['wal_level']}).",
        "",
        seen,
    )


def _on(setting: str) -> bool:
    return setting != "off"


def timescaledb(asked: Asked) -> Finding:
    """Whether TimescaleDB is there, and which features its licence leaves."""
    facts = asked.seen_database()
    licence = facts.settings.get("timescaledb.license", "")
    seen = {
        "version": facts.timescaledb or None,
        "offered": facts.timescaledb_offered or None,
        "licence": licence or None,
    }
    if not facts.timescaledb and not facts.timescaledb_offered:
        return Finding(
            "absent", "The server has no TimescaleDB: the log is partitioned natively.", "", seen
        )
    if not facts.timescaledb:
        return Finding(
            "absent",
            f"The server offers TimescaleDB {facts.timescaledb_offered}; this database does not "
            "have it.",
            "`create extension timescaledb` in an empty database, if you want it.",
            seen,
        )
    if licence != _COMMUNITY:
        return Finding(
            "ok",
            f"TimescaleDB {facts.timescaledb}, licence {licence or 'unknown'}: without "
            "compression, continuous aggregates and retention policies.",
            "Its community edition has them, if you need them.",
            seen,
        )
    return Finding("ok", f"TimescaleDB {facts.timescaledb}, community edition.", "", seen)


def clock(asked: Asked) -> Finding:
    """How far the server's clock is from ours."""
    facts = asked.seen_database()
    return drift_finding("PostgreSQL", Drift.between(facts.before_s, facts.there_s, facts.after_s))
