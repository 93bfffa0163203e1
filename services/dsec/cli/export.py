"""`dsec export`: episodes as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import click

from dsec.cli.answer import (
    Refused,
    answers,
    err,
    json_option,
    number,
    progress,
    run_async,
    say_json,
)
from dsec.cli.choose import group_option, label_option, session_option
from dsec.cli.find import find_session
from dsec.client.client import Client
from dsec.platform.log import Position

FORMATS = ("parquet", "minari", "jsonl")


def _position(_: click.Context, __: click.Parameter, given: str | None) -> Position | None:
    try:
        return None if given is None else Position.parse(given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.option("--format", "format_", type=click.Choice(FORMATS), required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="The file to write; with minari the dataset's folder.",
)
@group_option("Only the sessions of this group.")
@session_option("Only this one; repeat it.")
@label_option("Only with this label; repeat it.")
@click.option("--wait", is_flag=True, help="Wait for sessions that are not over.")
@click.option("--finished", is_flag=True, help="Leave out sessions that are not over.")
@click.option(
    "--as-of",
    callback=_position,
    metavar="POSITION",
    help="As the log had them at a position, such as an earlier export names.",
)
@click.option("--force", is_flag=True, help="Replace what is at --out.")
@json_option
@answers
def export(
    format_: str,
    out: Path,
    group_id: str | None,
    named: tuple[str, ...],
    labels: dict[str, str],
    wait: bool,
    finished: bool,
    as_of: Position | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write episodes as files: rewards with masks, failures with their codes, nothing left out."""
    from dsec.client.export.destination import Destination

    if named and (group_id or labels):
        raise click.UsageError(
            "--session names sessions; --group and --label choose some: not both"
        )
    if wait and finished:
        raise click.UsageError("--wait and --finished say different things: give one of them")
    if wait and as_of:
        raise click.UsageError("--as-of looks back, and --wait forward: give one of them")
    destination = Destination(out, folder=format_ == "minari", force=force)

    async def work() -> dict[str, Any]:
        async with Client(name="cli") as client:
            ids = (
                [await find_session(client.queries, name) for name in dict.fromkeys(named)]
                if named
                else await client.queries.selected(group_id=group_id, labels=labels)
            )
            return await _export(client, ids, format_, destination, wait, finished, as_of)

    told = run_async(work())
    if as_json:
        say_json(told)
        return
    _print(told)


async def _export(
    client: Client,
    ids: list[UUID],
    format_: str,
    destination: Any,
    wait: bool,
    finished: bool,
    as_of: Position | None,
) -> dict[str, Any]:
    from dsec.client.export.export import export as write
    from dsec.client.export.export import finished_and_not

    if not ids:
        raise Refused("no session matches: `dsec sessions list` shows what there is")
    over, running = await finished_and_not(client, ids, as_of)
    if running and not (wait or finished or as_of):
        raise Refused(
            f"{len(running)} of {len(ids)} sessions are not over: wait for them (--wait), or leave "
            "them out (--finished)"
        )
    if not over and as_of:
        raise Refused(f"no session was over at {as_of}")
    if not (over or wait):
        raise Refused("no session is over yet: wait for them with --wait")
    if wait and running and not as_of:
        await _wait_for(client, running)
        over, running = ids, []
    as_of = as_of or await client.position()
    with progress() as display:
        task = display.add_task("sessions written", total=len(over))
        totals = await write(
            client,
            over,
            format_,
            destination,
            as_of,
            lambda done: display.update(task, completed=done),
        )
    return {
        "ok": True,
        "path": str(destination.path),
        "format": format_,
        "as_of": str(as_of),
        "sessions": totals.sessions,
        "unfinished": len(running),
        "statuses": dict(sorted(totals.statuses.items())),
        "episodes": totals.episodes,
        "episodes_without_steps": totals.without_steps,
        "steps": totals.steps,
        "reward_total": totals.reward_total,
        "rewards_missing": totals.rewards_missing,
        "bytes": totals.bytes,
    }


async def _wait_for(client: Client, ids: list[UUID]) -> None:
    with progress() as display:
        task = display.add_task("sessions over", total=len(ids))
        await client.wait(ids, on_progress=lambda done: display.update(task, completed=done))


def _print(told: dict[str, Any]) -> None:
    statuses = ", ".join(f"{count} {status}" for status, count in told["statuses"].items())
    click.echo(
        f"{told['path']}: {told['episodes']} episodes of {told['sessions']} sessions ({statuses}), "
        f"{told['steps']} steps, reward {number(told['reward_total'])}, {told['bytes']} bytes"
    )
    click.echo(f"The same again, whatever is revised later: --as-of {told['as_of']}")
    if told["rewards_missing"]:
        click.echo(f"{told['rewards_missing']} rewards are missing: null, and False in the mask")
    if told["unfinished"]:
        err.print(f"{told['unfinished']} sessions are not over and were left out", highlight=False)
