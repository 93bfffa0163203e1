"""Why sessions did not complete, as sentences: equal reasons once, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

from dsec.client.queries import Summary
from dsec.client.told import last_line

REASONS_MAX = 5


def reason(status: str, code: str | None, message: str | None) -> str:
    """`failed, agent_raised: agent.py, line 7: ValueError: …`."""
    head = ", ".join(part for part in (status, code) if part)
    return f"{head}: {last_line(message)}" if message else head


def failure_lines(sessions: Iterable[Summary], messages: Mapping[UUID, str]) -> list[str]:
    """One line a reason, then the next step. Empty where all completed."""
    by_reason: dict[str, list[Summary]] = {}
    for session in sessions:
        if session.status != "completed":
            why = reason(session.status, session.code, messages.get(session.session_id))
            by_reason.setdefault(why, []).append(session)
    if not by_reason:
        return []
    lines = []
    for why, those in list(by_reason.items())[:REASONS_MAX]:
        count = "" if len(those) == 1 else f" (and {len(those) - 1} more for the same reason)"
        lines.append(f"{those[0].session_id} {why}{count}")
    if len(by_reason) > REASONS_MAX:
        lines.append(f"… and {len(by_reason) - REASONS_MAX} other reasons")
    first = next(iter(by_reason.values()))[0]
    return [*lines, _next_step(first)]


def missing_lines(sessions: Iterable[Summary]) -> list[str]:
    """That rewards are missing from sessions that completed all the same: their table shows it not.
    Empty where none is."""
    short = [s for s in sessions if s.status == "completed" and s.rewards_missing]
    if not short:
        return []
    missing, steps = sum(s.rewards_missing for s in short), sum(s.steps for s in short)
    which = "1 session" if len(short) == 1 else f"{len(short)} sessions"
    first = short[0].session_id
    return [
        f"{missing} of {steps} rewards of {which} are missing: `dsec sessions events {first} "
        "--kind reward.missing --facts --json` says why, `dsec services status` how outside "
        "services do."
    ]


def _next_step(session: Summary) -> str:
    if session.status == "rejected":
        return "Next: correct what the reason names, and run it again."
    return (
        f"Next: `dsec sessions show {session.session_id}` has the whole message and where it ran; "
        f"`dsec verify {session.session_id}` runs it again."
    )
