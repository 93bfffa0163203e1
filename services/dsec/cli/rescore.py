"""`dsec rescore`: the rewards of ended sessions, computed anew by another function."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import click

from dsec.cli.answer import (
    Refused,
    answers,
    exit_with,
    json_option,
    number,
    progress,
    run_async,
    say_json,
)
from dsec.cli.choose import group_option, session_option
from dsec.cli.find import find_session
from dsec.client.client import Client
from dsec.client.rescoring import rescore as rescore_sessions
from dsec.client.sealing import SealedSpec
from dsec.client.specs import read_spec

_HASH = re.compile(r"[0-9a-f]{64}")


@click.command()
@click.option(
    "--reward",
    required=True,
    metavar="SOURCE",
    help="FILE.py:FUNCTION, a YAML file, `env`, or the hash of a registered spec.",
)
@group_option("The sessions of this group.")
@session_option("This one; repeat it.")
@json_option
@answers
def rescore(reward: str, group_id: str | None, named: tuple[str, ...], as_json: bool) -> None:
    """Score ended sessions anew, as a later revision. Runs neither agents nor environments.

    Exits 1 where a step got no reward; it keeps the one that it had.
    """
    if bool(group_id) == bool(named):
        raise click.UsageError("say which sessions: --group, or --session once or more")
    spec = reward if _HASH.fullmatch(reward) else read_spec("reward", reward)
    told = run_async(_rescore(spec, group_id, named))
    if as_json:
        say_json(told)
    else:
        _print(told)
    exit_with(told["ok"])


async def _rescore(
    spec: str | SealedSpec, group_id: str | None, named: Sequence[str]
) -> dict[str, Any]:
    async with Client(name="cli") as client:
        ids: list[UUID] = (
            [await find_session(client.queries, name) for name in dict.fromkeys(named)]
            if named
            else await client.queries.selected(group_id=group_id)
        )
        if not ids:
            raise Refused("no session matches: `dsec sessions list` shows what there is")
        spec_hash = spec if isinstance(spec, str) else await client.register_sealed(spec)
        before = await _mean_total(client, ids)
        with progress() as display:
            task = display.add_task("sessions scored anew", total=len(ids))
            found = await rescore_sessions(
                client, ids, spec_hash, on_progress=lambda n: display.update(task, completed=n)
            )
        return {
            "ok": all(not (one.code or one.unscored) for one in found),
            "revision": found[0].revision,
            "reward_fn_hash": spec_hash,
            "sessions": len(found),
            "scored": sum(one.scored for one in found),
            "unscored": sum(one.unscored for one in found),
            "first_failure": next((one.message for one in found if one.message), None),
            "refused": {str(one.session_id): one.code for one in found if one.code},
            "mean_reward_total_before": before,
            "mean_reward_total": await _mean_total(client, ids),
        }


async def _mean_total(client: Client, ids: Sequence[UUID]) -> float | None:
    """Of the sessions that have one. Waits for nothing: what was said to be done is logged."""
    totals = [one.reward_total for one in await client.queries.summaries(ids)]
    known = [total for total in totals if total is not None]
    return sum(known) / len(known) if known else None


def _print(told: dict[str, Any]) -> None:
    click.echo(
        f"revision {told['revision']} of {told['sessions']} sessions: {told['scored']} rewards; "
        f"mean return {number(told['mean_reward_total_before'])} before, "
        f"{number(told['mean_reward_total'])} now"
    )
    if told["unscored"]:
        click.echo(f"{told['unscored']} steps got none and keep what they had; the first:")
        click.echo(str(told["first_failure"]).strip().splitlines()[-1])
    for session_id, code in told["refused"].items():
        click.echo(f"{session_id}: not scored, {code}")
    if told["refused"] and not told["unscored"] and told["first_failure"]:
        click.echo(told["first_failure"])
