"""`dsec metrics`: the metrics that users know by name, computed from the log when asked."""

from __future__ import annotations

from typing import Any

import click

from dsec.cli.answer import answers, json_option, number, out, progress, run_async, say_json
from dsec.cli.tables import plain_table, print_table
from dsec.client.client import Client
from dsec.client.verification import verify_sessions
from dsec.platform.telemetry.metrics import NAMED

COLLECTED = tuple(name for name, metric in NAMED.items() if "command" in metric.tellers)
NOWHERE = "not collected yet"
ELSEWHERE = "sent over OTLP only"


@click.command()
@click.option("--metric", "name", type=click.Choice(list(NAMED)), help="Only this one.")
@click.option(
    "--sessions",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    help="rscr looks at so many of the latest ended sessions, which it re-executes; ssal_p95 at so "
    "many of the latest that started.",
)
@json_option
@answers
def metrics(name: str | None, sessions: int, as_json: bool) -> None:
    """Show metrics with their units and definitions."""
    names = [name] if name is not None else list(NAMED)
    values = run_async(_collect([n for n in names if n in COLLECTED], sessions))
    told = [
        {
            "metric": n,
            "value": values.get(n),
            "unit": NAMED[n].unit,
            "collected": n in COLLECTED,
            "sent_over_otlp": "otlp" in NAMED[n].tellers,
            "definition": NAMED[n].definition,
        }
        for n in names
    ]
    if as_json:
        say_json(told[0] if name is not None else told)
        return
    table = plain_table("metric", "value", "unit", right=("value",))
    for row in told:
        uncollected = ELSEWHERE if row["sent_over_otlp"] else NOWHERE
        value = number(values.get(str(row["metric"]))) if row["collected"] else uncollected
        table.add_row(str(row["metric"]), value, str(row["unit"]))
    print_table(table)
    out.print()
    for row in told:
        out.print(f"{row['metric']}: {row['definition']}", markup=False, highlight=False)


async def _collect(names: list[str], sessions: int) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    if not names:
        return values
    async with Client(name="cli") as client:
        if "session_heartbeat_p95" in names:
            values["session_heartbeat_p95"] = await _heartbeat_p95(client)
        if "ssal_p95" in names:
            values["ssal_p95"] = await _start_latency_p95(client, sessions)
        if "tool_failure_rate" in names:
            values["tool_failure_rate"] = await _tool_failure_rate(client)
        if "anchor_miss_rate" in names:
            values["anchor_miss_rate"] = await _anchor_miss_rate(client)
        if "rscr" in names:
            values["rscr"] = await _rscr(client, sessions)
    return values


async def _heartbeat_p95(client: Client) -> float | None:
    """Only sessions that have not ended: the table keeps the others for a while."""
    rows = await client.queries.rows(
        "select percentile_cont(0.95) within group "
        "(order by extract(epoch from now() - heartbeat_at)) as p95 "
        "from session_live l where not exists (select from event_log e "
        "where e.session_id = l.session_id and e.session_at = session_time(l.session_id) "
        "and e.key = 'ended')"
    )
    value = rows[0].p95
    return None if value is None else float(value)


async def _start_latency_p95(client: Client, sessions: int) -> float | None:
    rows = await client.queries.rows(
        "select percentile_cont(0.95) within group "
        "(order by extract(epoch from s.event_time - r.event_time)) as p95 "
        "from (select session_id, session_at, event_time from event_log "
        "where kind = 'session.started' and step is null "
        "order by epoch desc, sequence desc limit :limit) s "
        "join event_log r on r.session_id = s.session_id and r.session_at = s.session_at "
        "and r.key = 'requested'",
        limit=sessions,
    )
    value = rows[0].p95
    return None if value is None else float(value)


async def _tool_failure_rate(client: Client) -> float | None:
    rows = await client.queries.rows(
        "select avg(case status when 'failed' then 1.0 else 0.0 end) as rate "
        "from tool_call where status <> 'waiting'"
    )
    return None if rows[0].rate is None else float(rows[0].rate)


async def _anchor_miss_rate(client: Client) -> float | None:
    """A load is a try of one anchor: a restart that passed one over and took another made two."""
    rows = await client.queries.rows(
        "select sum(t.missed) / nullif(sum(t.tried + (r.told->>'anchor_id' is not null)::int), 0) "
        "as rate from (select replace(circumstance::text, '\\u0000', '\\u2400')::json as told "
        "from event_log where kind = 'session.resumed' and step is null) r "
        "cross join lateral (select count(*) as tried, count(*) filter "
        "(where m->>'code' in ('blob_missing', 'blob_damaged')) as missed "
        "from json_array_elements(r.told->'misses') m) t"
    )
    return None if rows[0].rate is None else float(rows[0].rate)


async def _rscr(client: Client, sessions: int) -> float | None:
    rows = await client.queries.rows(
        "select session_id from event_log where kind = 'session.ended' and step is null "
        "order by epoch desc, sequence desc limit :limit",
        limit=sessions,
    )
    ids = [row.session_id for row in rows]
    if not ids:
        return None
    with progress() as display:
        task = display.add_task("rewards computed anew", total=len(ids))
        verdicts = await verify_sessions(
            client, ids, lambda done: display.update(task, completed=done)
        )
    return reward_share(verdicts)


def reward_share(verdicts: list[dict[str, Any]]) -> float | None:
    """The share of sessions with equal rewards; one that cannot be computed anew is not equal.

    Sessions without a step have no reward and do not count.
    """
    known = [v for v in verdicts if v["reward_ok"] is not None or v["error"]]
    return sum(v["reward_ok"] is True for v in known) / len(known) if known else None
