"""`dsec tools`: which tools are registered, and how their calls fare."""

from __future__ import annotations

from typing import Any

import click

from dsec.cli.answer import answers, json_option, number, out, run_async, say_json
from dsec.cli.find import find_session
from dsec.cli.tables import plain_table
from dsec.client.client import Client
from dsec_contracts.keys import session_time

CALLS_MAX = 10_000

_LIST = """
select spec_hash, name, registered_at from spec where kind = 'tool' order by registered_at desc
"""
_STATUS = """
select tool, count(*) as calls,
       count(*) filter (where status = 'returned') as returned,
       count(*) filter (where status = 'failed') as failed,
       count(*) filter (where status = 'waiting') as waiting,
       percentile_cont(0.95) within group (order by seconds) as seconds_p95,
       mode() within group (order by code) as code_most
from tool_call group by tool order by tool
"""
_CALLS = """
select step, call_id, tool, status, code, seconds, message from tool_call
where session_id = :session_id and session_at = :session_at order by step, turn, call limit :limit
"""


@click.group()
def tools() -> None:
    """Look at tools and their calls."""


@tools.command("list")
@json_option
@answers
def list_(as_json: bool) -> None:
    """List registered tools, the newest first."""
    found = run_async(_rows(_LIST))
    if as_json:
        say_json(found)
        return
    table = plain_table("tool", "hash", "registered")
    for tool in found:
        at = tool["registered_at"].strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(tool["name"] or "", tool["spec_hash"], at)
    out.print(table)


@tools.command()
@click.option("--session-id", "named", help="The calls of this session, one by one.")
@json_option
@answers
def status(named: str | None, as_json: bool) -> None:
    """Show how calls fared: over all sessions by tool, or those of one session."""
    found = run_async(_rows(_STATUS) if named is None else _calls(named))
    if as_json:
        say_json(found)
    elif named is None:
        _print_by_tool(found)
    else:
        _print_calls(found)


async def _rows(statement: str) -> list[dict[str, Any]]:
    async with Client(name="cli") as client:
        return [dict(row._mapping) for row in await client.queries.rows(statement)]


async def _calls(named: str) -> list[dict[str, Any]]:
    async with Client(name="cli") as client:
        session_id = await find_session(client.queries, named)
        rows = await client.queries.rows(
            _CALLS, session_id=session_id, session_at=session_time(session_id), limit=CALLS_MAX
        )
        return [dict(row._mapping) for row in rows]


def _print_by_tool(found: list[dict[str, Any]]) -> None:
    numbers = ("calls", "returned", "failed", "waiting", "p95 s")
    table = plain_table("tool", *numbers, "most frequent failure", right=numbers)
    for row in found:
        table.add_row(
            row["tool"],
            *(str(row[name]) for name in ("calls", "returned", "failed", "waiting")),
            number(row["seconds_p95"]),
            row["code_most"] or "",
        )
    out.print(table)


def _print_calls(found: list[dict[str, Any]]) -> None:
    table = plain_table("call", "tool", "status", "code", "s", "message", right=("s",))
    for row in found:
        last = (row["message"] or "").strip().rpartition("\n")[2]
        table.add_row(
            row["call_id"],
            row["tool"],
            row["status"],
            row["code"] or "",
            number(row["seconds"]),
            last[:80],
        )
    out.print(table)
