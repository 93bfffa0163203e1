"""`dsec sessions`: list, show, events, cancel."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import click

from dsec.cli.answer import answers, json_option, number, out, run_async, say_json
from dsec.cli.choose import group_option, label_option
from dsec.cli.find import find_session, whole_id
from dsec.cli.tables import plain_table, print_fields, print_summaries, print_table
from dsec.client.client import Client
from dsec.client.plain import plain
from dsec.client.queries import Summary
from dsec.session.curriculum import OPTION
from dsec.session.log_row import CURRICULUM_CHANGED, PLACED, REQUESTED, LogRow
from dsec_contracts.canonical import decode

STATUSES = ("queued", "running", "completed", "failed", "cancelled", "rejected")


@click.group()
def sessions() -> None:
    """List, show and cancel sessions."""


@sessions.command("list")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True)
@click.option("--status", type=click.Choice(STATUSES))
@group_option("Only this group.")
@label_option("Only with this label; repeat it.")
@json_option
@answers
def list_(as_json: bool, **chosen: Any) -> None:
    """List sessions, the newest first."""

    async def work() -> list[Summary]:
        async with Client(name="cli") as client:
            return await client.queries.recent(**chosen)

    found = run_async(work())
    if as_json:
        say_json([session.as_json() for session in found])
    elif found:
        print_summaries(found)
    elif any(chosen[name] for name in ("status", "group_id", "labels")):
        click.echo("No such sessions: `dsec sessions list` shows the latest of all.")
    else:
        click.echo("No sessions: `dsec demo` runs some, `dsec init DIR` writes one of your own.")


@sessions.command()
@click.argument("session_id")
@json_option
@answers
def show(session_id: str, as_json: bool) -> None:
    """Show one session: where it stands, where it ran, why it ended."""
    summary, rows, message, conflicts = run_async(_told_session(session_id))
    placements = [_placement(row) for row in rows if row.kind == PLACED]
    told = {**summary.as_json(), **curriculum_shown(rows)}
    if as_json:
        say_json({**told, "message": message, "placements": placements, "conflicts": conflicts})
        return
    print_summaries([summary])
    out.print()
    shown = ("session_id", "status", "steps", "reward_total")  # in the table
    print_fields({k: v for k, v in told.items() if k not in shown})
    for placement in placements:
        out.print(
            f"attempt {placement['attempt']:<8} {placement['worker']} ({placement['reason']})",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    for conflict in conflicts:
        out.print(conflict_line(conflict), soft_wrap=True, markup=False, highlight=False)
    if message:
        out.print(f"\n{message.rstrip()}", markup=False, highlight=False, soft_wrap=True)


def curriculum_shown(rows: list[LogRow]) -> dict[str, Any]:
    """The level that the session was given last, and how often it was changed; nothing of one that
    has none."""
    facts: list[dict[str, Any]] = [decode(row.fact) for row in rows if row.kind == REQUESTED]
    level = facts[0].get(OPTION) if facts else None
    if level is None:
        return {}
    changes = [decode(row.fact) for row in rows if row.kind == CURRICULUM_CHANGED]
    last = max(changes, key=lambda change: int(change["n"]), default={"level": level})
    return {OPTION: last["level"], "curriculum_changes": len(changes)}


async def _session(named: str) -> tuple[Summary, list[LogRow]]:
    async with Client(name="cli") as client:
        return await _found(client, named)


async def _found(client: Client, named: str) -> tuple[Summary, list[LogRow]]:
    session_id = await find_session(client.queries, named)
    summary = (await client.queries.summaries([session_id]))[0]
    return summary, await (await client.log()).rows(session_id)


_CONFLICTS = """
select key, kind, attempt, epoch, sequence, "index", kept_epoch, kept_sequence, kept_index
from event_aside where session_id = :session_id and verdict = 'conflict'
order by epoch, sequence, "index"
"""


def conflict_line(conflict: dict[str, Any]) -> str:
    """A determinism violation as one line."""
    first, other = (".".join(map(str, conflict[name])) for name in ("kept", "position"))
    return (
        f"not deterministic: {conflict['key']} came again with another fact. The log has the first "
        f"(position {first}); the other ({other}) is in the table event_aside."
    )


async def _conflicts(client: Client, session_id: UUID) -> list[dict[str, Any]]:
    found = await client.queries.rows(_CONFLICTS, session_id=session_id)
    return [
        {
            "key": row.key,
            "kind": row.kind,
            "attempt": row.attempt,
            "position": [row.epoch, row.sequence, row.index],
            "kept": [row.kept_epoch, row.kept_sequence, row.kept_index],
        }
        for row in found
    ]


async def _told_session(named: str) -> tuple[Summary, list[LogRow], str, list[dict[str, Any]]]:
    """With why it ended or, of one that was rejected, what the request lacks; and with what it
    did otherwise a second time."""
    async with Client(name="cli") as client:
        summary, rows = await _found(client, named)
        told = await client.queries.messages([summary.session_id])
        aside = await _conflicts(client, summary.session_id)
        return summary, rows, told.get(summary.session_id, ""), aside


def _placement(row: LogRow) -> dict[str, Any]:
    fact = decode(row.fact)
    return {
        "attempt": fact["attempt"],
        "worker": fact["worker"],
        "lane": fact["lane"],
        "alone": fact.get("alone", False),
        "reason": str((row.circumstance or {}).get("reason", "")),
        "at": row.event_time,
    }


@sessions.command()
@click.argument("session_id")
@click.option("--kind", help="Only this kind, such as session.stepped.")
@click.option("--limit", type=click.IntRange(1), help="Only so many, the last ones.")
@click.option("--facts", is_flag=True, help="With the decoded facts (JSON only).")
@json_option
@answers
def events(
    session_id: str, kind: str | None, limit: int | None, facts: bool, as_json: bool
) -> None:
    """List the events of one session, in the order of the log."""
    _, rows = run_async(_session(session_id))
    kinds = sorted({row.kind for row in rows})
    rows = [row for row in rows if kind is None or row.kind == kind][-(limit or 0) :]
    if as_json:
        say_json([_event(row, facts) for row in rows])
        return
    table = plain_table("position", "key", "value", "attempt", "cause", right=("value", "attempt"))
    for row in rows:
        table.add_row(
            ".".join(str(part) for part in row.position),
            row.key,
            "" if row.value is None else number(row.value),
            "" if row.attempt is None else str(row.attempt),
            row.cause or "",
        )
    print_table(table, empty=f"No event of kind {kind}; there are: {', '.join(kinds)}.")


def _event(row: LogRow, facts: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "position": list(row.position),
        "key": row.key,
        "kind": row.kind,
        "step": row.step,
        "episode": row.episode,
        "attempt": row.attempt,
        "value": row.value,
        "terminated": row.terminated,
        "truncated": row.truncated,
        "chain": row.chain,
        "cause": row.cause,
        "event_id": row.event_id,
        "event_time": row.event_time,
    }
    if facts:
        told["fact"] = plain(decode(row.fact))
    return told


@sessions.command()
@click.argument("session_ids", nargs=-1, required=True)
@click.option("--reason", help="For those who look at it later.")
@json_option
@answers
def cancel(session_ids: tuple[str, ...], reason: str | None, as_json: bool) -> None:
    """Ask that sessions end. They do at their next step."""

    async def work() -> list[str]:
        async with Client(name="cli") as client:
            found = [
                whole_id(named) or await find_session(client.queries, named)
                for named in session_ids
            ]
            await client.cancel(found, reason)
            return [str(session_id) for session_id in found]

    asked = run_async(work())
    if as_json:
        say_json({"ok": True, "session_ids": asked})
    else:
        what = "1 session" if len(asked) == 1 else f"{len(asked)} sessions"
        click.echo(f"Asked {what} to end: at the next step, where one is not over already.")
