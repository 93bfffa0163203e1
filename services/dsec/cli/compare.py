"""`dsec compare A.yaml B.yaml`: two agents over the same seeds, pair by pair."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from dsec.cli.answer import answers, err, exit_with, json_option, progress, run_async, say_json
from dsec.cli.paired import Difference, paired_difference
from dsec.cli.replay import difference_json
from dsec.client.client import Client, Group
from dsec.client.queries import Summary
from dsec.client.specs import SessionPlan, read_session
from dsec.replay.diff import LogSource
from dsec.replay.diff import diff as diff_sessions

PAIRS_MAX = 10_000
DIFFS_AT_ONCE_MAX = 4


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--count", type=click.IntRange(1, PAIRS_MAX), default=20, show_default=True)
@click.option("--seed", type=click.IntRange(0), help="Of the first pair.  [default: A's]")
@json_option
@answers
def compare(a: Path, b: Path, count: int, seed: int | None, as_json: bool) -> None:
    """Run two session files over paired seeds: the mean difference of their rewards, B minus A.

    The interval is the 95 % interval of the paired t test. Pairs of which a session did not
    complete are not averaged over, are listed, and make the answer no.
    """
    told = run_async(_compare(read_session(a), read_session(b), count, seed))
    if as_json:
        say_json(told)
    else:
        _print(told)
    exit_with(told["ok"])


async def _compare(a: SessionPlan, b: SessionPlan, count: int, seed: int | None) -> dict[str, Any]:
    warnings = _warnings(a, b)
    for warning in warnings:
        err.print(f"Note: {warning}", markup=False)
    first = a.session.seed if seed is None else seed
    async with Client(name="cli") as client:
        groups = [await client.request(plan, count=count, seed=first) for plan in (a, b)]
        one, two = await _wait(client, groups)
        told = assess(one, two)
        told["first_divergences"] = await _divergences(client, one, two)
    told["warnings"] = warnings
    return told


def _warnings(a: SessionPlan, b: SessionPlan) -> list[str]:
    names = ("agents", "environments", "reward functions")
    pairs = list(zip(names, a.hashes(), b.hashes(), strict=True))
    found = [f"the {name} differ too" for name, one, two in pairs[1:] if one != two]
    if pairs[0][1] == pairs[0][2]:
        found.append("both files have the same agent")
    if a.session.max_steps != b.session.max_steps:
        found.append("max_steps differs")
    return found


async def _wait(client: Client, groups: list[Group]) -> list[list[Summary]]:
    ids = [session_id for group in groups for session_id in group.session_ids]
    with progress() as display:
        task = display.add_task("sessions over", total=len(ids))
        found = await client.wait(
            ids, on_progress=lambda done: display.update(task, completed=done)
        )
    return [found[: len(ids) // 2], found[len(ids) // 2 :]]


def assess(a: list[Summary], b: list[Summary]) -> dict[str, Any]:
    """The documented keys, from the summaries of both sides in the order of the pairs."""
    whole, failed = [], []
    for one, two in zip(a, b, strict=True):
        bad = [s for s in (one, two) if s.status != "completed" or s.reward_total is None]
        if bad:
            failed += [
                {"session_id": str(s.session_id), "status": s.status, "code": s.code} for s in bad
            ]
        else:
            whole.append((one.reward_total or 0.0, two.reward_total or 0.0))
    found: Difference = paired_difference([x for x, _ in whole], [y for _, y in whole])
    return {
        "ok": not failed,
        "pairs": found.pairs,
        "mean_difference": found.mean_difference,
        "ci95": list(found.ci95) if found.ci95 is not None else None,
        "mean_a": sum(x for x, _ in whole) / len(whole) if whole else None,
        "mean_b": sum(y for _, y in whole) / len(whole) if whole else None,
        "failed": failed,
    }


async def _divergences(client: Client, a: list[Summary], b: list[Summary]) -> list[dict[str, Any]]:
    """Where each pair parts first."""
    log = await client.log()
    at_once = asyncio.Semaphore(DIFFS_AT_ONCE_MAX)

    async def first(one: Summary, two: Summary) -> dict[str, Any]:
        async with at_once:
            found = await diff_sessions(
                LogSource(log, one.session_id), LogSource(log, two.session_id)
            )
        told = difference_json(found)["first_difference"] or {}
        pair = {"seed": one.seed, "a": str(one.session_id), "b": str(two.session_id)}
        return {**pair, "step": told.get("step"), "field": told.get("field")}

    return list(await asyncio.gather(*(first(x, y) for x, y in zip(a, b, strict=True))))


def _print(told: dict[str, Any]) -> None:
    if told["mean_difference"] is None:
        click.echo("No pair completed.")
    else:
        interval = "no interval from one pair"
        if told["ci95"] is not None:
            interval = f"95 % CI {told['ci95'][0]:.4g} to {told['ci95'][1]:.4g}"
        click.echo(f"pairs            {told['pairs']}")
        click.echo(f"mean A, mean B   {told['mean_a']:.6g}, {told['mean_b']:.6g}")
        click.echo(f"mean difference  {told['mean_difference']:.6g} (B - A; {interval})")
    for failure in told["failed"]:
        click.echo(f"left out: {failure['session_id']} {failure['status']} {failure['code']}")
    parted = [d for d in told["first_divergences"] if d["field"] is not None]
    if parted:
        steps = [d["step"] for d in parted if d["step"] is not None]
        at = f", the earliest at step {min(steps)}" if steps else ""
        click.echo(f"{len(parted)} pairs part{at}; --json lists where.")
