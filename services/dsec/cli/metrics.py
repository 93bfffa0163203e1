"""`dsec metrics`: the metrics that users know by name, computed from the log when asked."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from dsec.cli.answer import answers, json_option, number, out, progress, run_async, say_json
from dsec.cli.tables import plain_table
from dsec.client.client import Client
from dsec.client.verification import verify_sessions


class Metric(NamedTuple):
    """A metric's unit and definition."""

    unit: str
    definition: str


METRICS = {
    "rscr": Metric(
        "share",
        "sessions whose rewards, computed anew from the recorded transitions, equal the recorded "
        "ones at every step",
    ),
    "session_heartbeat_p95": Metric(
        "s", "95th percentile of the age of the last heartbeat over live sessions"
    ),
    "rus": Metric("share", "resources in use over resources there"),
    "ssal_p95": Metric("s", "95th percentile from a session's request to its start"),
    "anchor_miss_rate": Metric("share", "anchor loads that found no blob over loads"),
    "tool_failure_rate": Metric("share", "tool calls that failed over calls"),
    "rvs_skew": Metric("1", "skew of the reward variance over nodes"),
}
COLLECTED = ("rscr", "session_heartbeat_p95")


@click.command()
@click.option("--metric", "name", type=click.Choice(list(METRICS)), help="Only this one.")
@click.option(
    "--sessions",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    help="rscr looks at so many of the latest ended sessions; it re-executes them.",
)
@json_option
@answers
def metrics(name: str | None, sessions: int, as_json: bool) -> None:
    """Show metrics with their units and definitions."""
    names = [name] if name is not None else list(METRICS)
    values = run_async(_collect([n for n in names if n in COLLECTED], sessions))
    told = [
        {
            "metric": n,
            "value": values.get(n),
            "unit": METRICS[n].unit,
            "collected": n in COLLECTED,
            "definition": METRICS[n].definition,
        }
        for n in names
    ]
    if as_json:
        say_json(told[0] if name is not None else told)
        return
    table = plain_table("metric", "value", "unit", "definition", right=("value",))
    for row in told:
        value = number(values.get(str(row["metric"]))) if row["collected"] else "not collected yet"
        table.add_row(str(row["metric"]), value, str(row["unit"]), str(row["definition"]))
    out.print(table)


async def _collect(names: list[str], sessions: int) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    if not names:
        return values
    async with Client(name="cli") as client:
        if "session_heartbeat_p95" in names:
            values["session_heartbeat_p95"] = await _heartbeat_p95(client)
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
