"""`dsec demo`: the main promise on built-in input, in under a minute, with a worker killed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

import click

from dsec.cli.answer import answers, err, exit_with, json_option, run_async, say_json
from dsec.cli.experiment import WorkerKiller, follow, identical_at_every_step, problems
from dsec.cli.init import write_templates
from dsec.cli.own_stack import some_client
from dsec.client.client import Client
from dsec.client.specs import SessionPlan, read_session

SESSIONS_EACH = 10
STEPS = 50


@click.command()
@json_option
@answers
def demo(as_json: bool) -> None:
    """Run ten equal CartPole sessions and ten that differ, kill a worker, check every step."""
    told = run_async(_demo())
    if as_json:
        say_json(told)
    else:
        _print(told)
    exit_with(told["ok"])


def _say(sentence: str) -> None:
    err.print(sentence, markup=False, highlight=False)


def demo_plan() -> SessionPlan:
    """What `dsec init` writes, cut to `STEPS` steps."""
    with tempfile.TemporaryDirectory(prefix="dsec-demo-") as folder:
        write_templates(Path(folder))
        plan = read_session(Path(folder) / "session.yaml")
    session = plan.session.model_copy(update={"max_steps": STEPS, "labels": {"dsec": "demo"}})
    return SessionPlan(session, plan.agent, plan.env, plan.reward)


async def _demo() -> dict[str, Any]:
    began = monotonic()
    async with some_client(_say) as (client, temporary):
        told = await _run(client)
    told["seconds"] = round(monotonic() - began, 1)
    told["stack_is_temporary"] = temporary
    return told


async def _run(client: Client) -> dict[str, Any]:
    plan = demo_plan()
    killer = WorkerKiller()
    await killer.arm(client)
    _say(f"Requesting {SESSIONS_EACH} equal sessions and {SESSIONS_EACH} that differ …")
    equal = await client.request(plan, count=SESSIONS_EACH, seeds="same")
    differing = await client.request(plan, count=SESSIONS_EACH, seed=plan.session.seed + 1)
    ids = [*equal.session_ids, *differing.session_ids]
    killer.aim(ids)
    outcome = await follow(client, ids, _say)
    same = await identical_at_every_step(client, equal.session_ids, STEPS)
    chains = {s.chain_hash for s in outcome.summaries[SESSIONS_EACH:]}
    checks = {
        "identical": same == SESSIONS_EACH,
        "different": len(chains) == SESSIONS_EACH,
        "verified": outcome.verified == len(ids),
        "worker_killed": killer.killed is not None,
    }
    return {
        "ok": all(checks.values()) and outcome.rscr == 1.0,
        "sessions": len(ids),
        "steps": STEPS,
        **checks,
        "sessions_identical": same,
        "sessions_different": len(chains),
        "sessions_verified": outcome.verified,
        "rscr": outcome.rscr,
        "attempts": sum(s.attempts for s in outcome.summaries),
        "chain_hash": outcome.summaries[0].chain_hash,
        "session_ids": ids,
        "problems": problems(outcome),
    }


def _print(told: dict[str, Any]) -> None:
    killed = "was killed on the way" if told["worker_killed"] else "could not be killed in time"
    click.echo(
        f"{told['sessions_identical']} of {SESSIONS_EACH} equal sessions have the same chain hash "
        f"at every one of {STEPS} steps\n"
        f"{told['sessions_different']} of {SESSIONS_EACH} that differ have one of their own\n"
        f"{told['sessions_verified']} of {told['sessions']} verify: executed again, they do the "
        "same\n"
        f"rscr {told['rscr']}: the share of sessions whose rewards, computed anew, are the same\n"
        f"a worker {killed}; {told['attempts']} placements for {told['sessions']} sessions\n"
        f"{told['seconds']} s, {'all is well' if told['ok'] else 'NOT as it should be'}"
    )
    for problem in told["problems"]:
        click.echo(f"  {problem}")
    if told["stack_is_temporary"]:
        click.echo("\nNext: dsec up --detach; dsec init DIR; dsec run DIR/session.yaml --follow")
        return
    one = told["session_ids"][0]
    click.echo(f"\nNext: dsec sessions show {one}\n      dsec why {one}/step:{STEPS - 1}")
