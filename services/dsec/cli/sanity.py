"""`dsec policy-sanity-check`: what agents say about their decisions, held against the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import click

from dsec.cli.answer import (
    Refused,
    answers,
    exit_with,
    json_option,
    number,
    out,
    progress,
    run_async,
    say_json,
)
from dsec.cli.choose import group_option, session_option
from dsec.cli.find import find_session
from dsec.cli.tables import plain_table, print_table
from dsec.client.client import Client
from dsec.client.queries import Summary
from dsec.evaluator.audit import Audit, audit

SHOWN_MAX = 10
"""Of the steps that rest on calls that never happened, in the table's footer."""


@dataclass(slots=True)
class _Agent:
    """What was found about one agent."""

    spec: str
    sessions: int = 0
    audit: Audit = field(default_factory=Audit)
    unknown: list[dict[str, Any]] = field(default_factory=list)


@click.command()
@group_option("Only the sessions of this group.")
@session_option("Only this one; repeat it.")
@click.option("--agent", metavar="HASH", help="Only this agent, by the start of its spec's hash.")
@click.option(
    "--sessions",
    "limit",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    help="Look at so many of the latest sessions, where none are named.",
)
@json_option
@answers
def policy_sanity_check(
    group_id: str | None, named: tuple[str, ...], agent: str | None, limit: int, as_json: bool
) -> None:
    """Audit provenance: share of actions that have it, confidence beside reward, tool calls.

    Exits 1 where a step rests on a tool call that had not happened, where provenance is malformed,
    or where an agent that gives provenance has tool calls that none of it names.
    """
    agents = run_async(_collect(group_id, named, agent, limit))
    ok = all(one.audit.ok for one in agents)
    if as_json:
        say_json({"ok": ok, "agents": [_told(one) for one in agents]})
    else:
        _print(agents)
    exit_with(ok)


async def _collect(
    group_id: str | None, named: tuple[str, ...], agent: str | None, limit: int
) -> list[_Agent]:
    found: dict[str, _Agent] = {}
    async with Client(name="cli") as client:
        summaries = await _sessions(client, group_id, named, limit)
        log = await client.log()
        with progress() as display:
            task = display.add_task("sessions audited", total=len(summaries))
            for summary in summaries:
                spec = summary.specs.get("agent") or ""
                if spec and spec.startswith(agent or ""):
                    rows = await log.said_rows(summary.session_id)
                    _add(
                        found.setdefault(spec, _Agent(spec)),
                        summary.session_id,
                        audit(summary.steps, rows),
                    )
                display.advance(task)
    if not found:
        raise Refused("no session matches: `dsec sessions list` shows what there is")
    return list(found.values())


async def _sessions(
    client: Client, group_id: str | None, named: tuple[str, ...], limit: int
) -> list[Summary]:
    if named:
        ids = [await find_session(client.queries, name) for name in dict.fromkeys(named)]
        return await client.queries.summaries(ids)
    return await client.queries.recent(limit=limit, group_id=group_id)


def _add(agent: _Agent, session_id: UUID, found: Audit) -> None:
    agent.sessions += 1
    agent.audit.add(found)
    agent.unknown += [{"session_id": str(session_id), **c._asdict()} for c in found.unknown_calls]


def _told(agent: _Agent) -> dict[str, Any]:
    found = agent.audit
    bins = zip(found.confident, found.confidence_sum, found.reward_sum, strict=True)
    return {
        "agent_spec": agent.spec,
        "ok": found.ok,
        "sessions": agent.sessions,
        "steps": found.steps,
        "provenance_share": found.with_provenance / found.steps if found.steps else None,
        "provenance_malformed": found.provenance_malformed,
        "confident_steps": sum(found.confident),
        "calibration_error": found.calibration_error,
        "confidence_reward_correlation": found.correlation,
        "calibration": [
            {"steps": n, "confidence_mean": confidence / n, "reward_mean": reward / n}
            for n, confidence, reward in bins
            if n
        ],
        "tool_calls": found.tool_calls,
        "tool_calls_without_provenance": found.tool_calls_without_provenance,
        "unknown_tool_calls_total": found.unknown_calls_total,
        "unknown_tool_calls": agent.unknown,
    }


def _print(agents: list[_Agent]) -> None:
    numbers = (
        "sessions",
        "steps",
        "with provenance",
        "malformed",
        "calibration error",
        "correlation",
        "tool calls",
        "not named",
        "never happened",
    )
    table = plain_table("agent", *numbers, right=numbers)
    for one in agents:
        told, found = _told(one), one.audit
        share = told["provenance_share"]
        table.add_row(
            one.spec[:12],
            str(one.sessions),
            str(found.steps),
            "-" if share is None else f"{share:.1%}",
            str(found.provenance_malformed),
            number(found.calibration_error),
            number(found.correlation),
            str(found.tool_calls),
            str(found.tool_calls_without_provenance),
            str(found.unknown_calls_total),
        )
    print_table(table)
    for one in agents:
        for call in one.unknown[:SHOWN_MAX]:
            out.print(
                f"{call['session_id']} step {call['step']} rests on {call['tool_call_id']}, which "
                "had not happened",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )
