"""A verdict on a session, as JSON: what was found, and how the session ended by its own record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dsec.client.plain import plain
from dsec.session import log_row
from dsec.session.log_row import LogRow
from dsec_contracts.canonical import decode

if TYPE_CHECKING:  # it loads the session machine, which those who only read verdicts can do without
    from dsec.replay.verify import Verdict


def end_of(rows: Iterable[LogRow]) -> dict[str, str | None] | None:
    """`status, code, message` of a session's end; None where it has none."""
    row = next((row for row in rows if row.kind == log_row.ENDED), None)
    if row is None:
        return None
    fact = decode(row.fact)
    message = str((row.circumstance or {}).get("message") or "")
    return {"status": fact.get("status"), "code": fact.get("code"), "message": message}


def verdict_json(
    session_id: UUID, verdict: Verdict, ended: dict[str, str | None] | None
) -> dict[str, Any]:
    """The documented keys of `verify`."""
    first = verdict.first_divergence
    return {
        "session_id": str(session_id),
        "ok": verdict.ok,
        "steps": verdict.steps,
        "reward_ok": verdict.reward_ok,
        "rewards_compared": verdict.rewards_compared,
        "complete": verdict.complete,
        "determinism": verdict.determinism,
        "first_divergence": None
        if first is None
        else {
            "step": first.step,
            "field": first.field,
            "expected": plain(first.expected),
            "actual": plain(first.actual),
        },
        "ended": ended,
        "error": None,
    }


def unverified(session_id: UUID, error: str) -> dict[str, Any]:
    """The same keys for a session that could not be verified."""
    return {
        "session_id": str(session_id),
        "ok": False,
        "steps": 0,
        "reward_ok": None,
        "rewards_compared": 0,
        "complete": False,
        "determinism": None,
        "first_divergence": None,
        "ended": None,
        "error": error,
    }
