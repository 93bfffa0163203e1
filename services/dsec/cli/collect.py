"""`dsec anchors collect`: remove what the object store has and the log does not name."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from dsec.cli.answer import answers, json_option, out, progress, run_async, say_json
from dsec.client.client import Client
from dsec.client.collecting import Collected
from dsec.client.collecting import collect as collect_from
from dsec.platform.object_listing import COLLECT_AGE_S_MIN

DAY_S = 86_400.0
OLDER_THAN_DAYS = 7.0


@click.command()
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(COLLECT_AGE_S_MIN / DAY_S),
    default=OLDER_THAN_DAYS,
    show_default=True,
    metavar="DAYS",
    help="Leave alone what was written since then; at least an hour.",
)
@click.option("--dry-run", is_flag=True, help="Say what there is, and remove nothing.")
@click.option("--force", is_flag=True, help="Although the log names no blob of this store.")
@json_option
@answers
def collect(days: float, dry_run: bool, force: bool, as_json: bool) -> None:
    """Remove blobs that no row of the log names.

    Of anchors and of everything else: those are blobs whose event was never published, and those
    of sessions that retention dropped. What the log names stays, whoever names it; so does what is
    young.
    """
    found = run_async(_collect(time.time() - days * DAY_S, dry_run, force))
    if as_json:
        say_json({**asdict(found), "dry_run": dry_run})
        return
    out.print(
        f"{found.place}: of {found.older} objects older than {days:g} days the log names "
        f"{found.named}. {found.orphans} blobs ({found.orphan_bytes} bytes) are named nowhere, "
        f"{found.left} drafts were left behind. "
        + ("Nothing was removed." if dry_run else f"{found.removed} removed."),
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


async def _collect(before_s: float, dry_run: bool, force: bool) -> Collected:
    async with Client(name="cli") as client:
        with progress() as display:
            task = display.add_task("removed", total=None)
            return await collect_from(
                client,
                before_s,
                dry_run=dry_run,
                force=force,
                on_progress=lambda done, of: display.update(task, completed=done, total=of),
            )
