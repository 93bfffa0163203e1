"""`dsec tools`: which tools are registered, and how their calls fare."""

from __future__ import annotations

from typing import Any

import click

from dsec.cli.answer import answers, json_option, number, run_async, say_json
from dsec.cli.find import find_session
from dsec.cli.tables import plain_table, print_table
from dsec.client.client import Client
from dsec_contracts.keys import session_time

CALLS_MAX = 10_000
ERROR_CHARS_MAX = 120
"""Of an error in a table; `--json` has the whole."""

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
select c.session_id, c.step, c.call_id, c.tool, c.status, c.code, c.seconds, c.message,
       c.called_at,
       extract(epoch from coalesce(c.answered_at, now()) - c.called_at)::float8 as age_s,
       (a.told->'tools'->c.tool->>'deadline_s')::float8 as deadline_s,
       coalesce((r.told->>'attempts')::int, t.failed + (b.key is not null or t.failed > 0)::int)
           as attempts,
       coalesce(c.code || ': ' || c.message, l.error) as last_error
from tool_call c
cross join lateral (select step || '.' || turn || '.' || call as place) p
join lateral (select replace(circumstance::text, '\\u0000', '\\u2400')::json as told
    from event_log e where e.session_id = c.session_id and e.session_at = c.session_at
    and e.key = 'tool_call:' || c.step || '.' || c.turn) a on true
left join lateral (select replace(circumstance::text, '\\u0000', '\\u2400')::json as told
    from event_log e where e.session_id = c.session_id and e.session_at = c.session_at
    and e.key = 'tool_result:' || p.place) r on true
left join event_log b on b.session_id = c.session_id and b.session_at = c.session_at
    and b.key = 'tool_begun:' || p.place
cross join lateral (select count(*)::int as failed from event_log e
    where e.session_id = c.session_id and e.session_at = c.session_at
    and e.key like 'tool_retried:' || p.place || '.%') t
left join lateral (select x.told->>'code' || ': ' || (x.told->>'message') as error from (
    select replace(circumstance::text, '\\u0000', '\\u2400')::json as told, epoch, sequence
    from event_log e where e.session_id = c.session_id and e.session_at = c.session_at
    and e.key like 'tool_retried:' || p.place || '.%'
    order by epoch desc, sequence desc limit 1) x) l on true
"""
_OF_SESSION = (
    _CALLS
    + """
where c.session_id = :session_id and c.session_at = :session_at
order by c.step, c.turn, c.call limit :limit
"""
)
_PENDING = (
    _CALLS
    + """
where c.status = 'waiting' and not exists (select from event_log e
    where e.session_id = c.session_id and e.session_at = c.session_at and e.key = 'ended')
order by c.called_at limit :limit
"""
)
"""What a session that is over has called is nobody's any more."""


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
    print_table(
        table,
        empty="No tools: `tools` in an agent's spec names some; they are registered with it.",
    )


@tools.command()
@click.option(
    "--session",
    "--session-id",
    "named",
    metavar="ID",
    help="The calls of this session, one by one.",
)
@click.option("--pending", is_flag=True, help="The calls that wait now, the oldest first.")
@json_option
@answers
def status(named: str | None, pending: bool, as_json: bool) -> None:
    """Show how calls fared: by tool, of one session, or those that wait."""
    # An empty id is asked for like any other, and is none: it does not mean all sessions.
    of_calls = named is not None or pending
    found = run_async(_calls(named, pending) if of_calls else _rows(_STATUS))
    if as_json:
        say_json(found)
    elif of_calls:
        _print_calls(found)
    else:
        _print_by_tool(found)


async def _rows(statement: str) -> list[dict[str, Any]]:
    async with Client(name="cli") as client:
        return [dict(row._mapping) for row in await client.queries.rows(statement)]


async def _calls(named: str | None, pending: bool) -> list[dict[str, Any]]:
    async with Client(name="cli") as client:
        if named is None:
            rows = await client.queries.rows(_PENDING, limit=CALLS_MAX)
            return [dict(row._mapping) for row in rows]
        session_id = await find_session(client.queries, named)
        rows = await client.queries.rows(
            _OF_SESSION, session_id=session_id, session_at=session_time(session_id), limit=CALLS_MAX
        )
        found = [dict(row._mapping) for row in rows]
        return [row for row in found if row["status"] == "waiting"] if pending else found


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
    print_table(table, empty="No calls yet.")


def _print_calls(found: list[dict[str, Any]]) -> None:
    numbers = ("age s", "deadline s", "attempts")
    table = plain_table("session", "call", "tool", "status", *numbers, "last error", right=numbers)
    for row in found:
        table.add_row(
            str(row["session_id"]),
            row["call_id"],
            row["tool"],
            row["status"],
            number(row["age_s"]),
            number(row["deadline_s"]),
            str(row["attempts"]),
            _last_line(row["last_error"]),
        )
    print_table(table, empty="No calls.")


def _last_line(error: str | None) -> str:
    """The code, and the line of a traceback that says most."""
    code, _, message = (error or "").partition(": ")
    line = message.strip().rpartition("\n")[2]
    cut = f"{line[: ERROR_CHARS_MAX - 1]}…" if len(line) > ERROR_CHARS_MAX else line
    return f"{code}: {cut}" if line else code
