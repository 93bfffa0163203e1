"""`dsec run FILE`: request sessions, and follow them if asked."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any
from uuid import UUID

import click

from dsec.cli.answer import answers, err, exit_with, json_option, progress, run_async, say_json
from dsec.cli.choose import group_option, label_option
from dsec.cli.failures import failure_lines, missing_lines
from dsec.cli.tables import print_summaries
from dsec.client.client import Client, Group
from dsec.client.queries import Summary
from dsec.client.requests import SEED_MODES, SESSIONS_PER_REQUEST_MAX
from dsec.client.services_file import asked_services, undeclared
from dsec.client.specs import SessionPlan, read_session
from dsec.platform.log import LogUnavailable


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--count", type=click.IntRange(1, SESSIONS_PER_REQUEST_MAX), default=1, show_default=True
)
@click.option(
    "--seeds",
    type=click.Choice(SEED_MODES),
    default="increment",
    show_default=True,
    help="increment: one each; same: all equal; same_env: the environment's held, the agent's not.",
)
@click.option("--seed", type=click.IntRange(0), help="In place of the file's.")
@click.option("--policy", metavar="NAME@VERSION", help="Weights to pin the sessions to.")
@group_option("In place of the file's.")
@label_option("Added to the file's; repeat it.")
@click.option(
    "--traceparent",
    envvar="TRACEPARENT",
    show_envvar=True,
    help="A span of yours (a W3C header) that the sessions' traces link to.",
)
@click.option("--follow", is_flag=True, help="Wait until all are over; exit 1 if one failed.")
@click.option("--no-check", is_flag=True, help="Do not try the environment out first.")
@json_option
@answers
def run(file: Path, follow: bool, no_check: bool, as_json: bool, **how: Any) -> None:
    """Request the sessions of a session.yaml."""
    how["check"] = not no_check
    requested: list[Group] = []
    try:
        group, sessions, messages = run_async(_run(read_session(file), follow, how, requested))
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(run_on(requested)) from interrupt
    ok = all(session.status == "completed" for session in sessions)
    if as_json:
        told = {"ok": ok, "group_id": group.group_id, "session_ids": list(group.session_ids)}
        ends = [{**s.as_json(), "message": messages.get(s.session_id, "")} for s in sessions]
        say_json({**told, "sessions": ends} if follow else told)
    elif follow:
        print_summaries(sessions)
        for line in (*missing_lines(sessions), *failure_lines(sessions, messages)):
            err.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        for session_id in group.session_ids:
            click.echo(session_id)
        err.print("Requested. They run now; `dsec sessions list` shows how they do.")
    exit_with(ok)


def run_on(requested: list[Group]) -> str:
    """What becomes of the sessions that nobody waits for any more."""
    if not requested:
        return "Nothing may have been requested yet: `dsec sessions list` shows whether it was."
    group = requested[0]
    return (
        f"The {len(group.session_ids)} requested sessions run on: `dsec sessions list --group "
        f"{group.group_id}` shows them, `dsec sessions cancel ID …` ends them."
    )


def undeclared_line(services: Sequence[str]) -> str:
    """What becomes of rewards whose services nobody has declared."""
    names = " and ".join(map(repr, services))
    are = "are" if len(services) > 1 else "is"
    return (
        f"The reward function asks {names}, which {are} not declared: `dsec services declare "
        "services.yaml`. Until then its sessions wait; after a minute of that they fail."
    )


async def warn_of_undeclared(client: Client, asked: Set[str]) -> None:
    """Say which of the services that a session asks nobody has declared."""
    try:
        missing = await undeclared(await client.log(), asked)
    except LogUnavailable:
        return  # a request needs no log, and this was a word of advice
    if missing:
        err.print(undeclared_line(missing), markup=False, highlight=False, soft_wrap=True)


async def _run(
    plan: SessionPlan, follow: bool, how: dict[str, Any], requested: list[Group]
) -> tuple[Group, list[Summary], dict[UUID, str]]:
    async with Client(name="cli") as client:
        if asked := asked_services(plan.reward):
            await warn_of_undeclared(client, asked)
        group = await client.request(plan, **how)
        requested.append(group)
        if not follow:
            return group, [], {}
        with progress() as display:
            task = display.add_task("sessions over", total=len(group.session_ids))
            sessions = await client.wait(
                group, on_progress=lambda done: display.update(task, completed=done)
            )
        bad = [s.session_id for s in sessions if s.status != "completed"]
        return group, sessions, await client.queries.messages(bad)
