"""`dsec validate-determinism`: does an environment, of whatever kind, come out the same here?"""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import click

from dsec.cli.answer import answers, err, exit_with, json_option, run_async, say_json
from dsec.cli.experiment import WorkerKiller, follow, identical_at_every_step, problems
from dsec.cli.own_stack import some_client
from dsec.client.client import Client
from dsec.client.reward_file import read_reward
from dsec.client.sealing import SealedSpec
from dsec.client.specs import SessionPlan, read_spec
from dsec.session.documents import SessionDocument

SAMPLER = "dsec.client.check:Sampler"


@click.command("validate-determinism")
@click.option(
    "--env", "env", default="CartPole-v1", show_default=True, help="A Gymnasium id or a YAML file."
)
@click.option("--sessions", type=click.IntRange(2, 10_000), default=10, show_default=True)
@click.option("--steps", type=click.IntRange(1, 1_000_000), default=100, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--kill-worker", is_flag=True, help="Kill a worker on the way.")
@json_option
@answers
def validate_determinism(
    env: str, sessions: int, steps: int, seed: int, kill_worker: bool, as_json: bool
) -> None:
    """Run equal sessions of an environment with sampled actions; compare and verify every step."""
    plan = _plan(_env_spec(env), steps, seed)
    told = run_async(_validate(plan, sessions, kill_worker))
    if as_json:
        say_json(told)
    else:
        _print(env, told)
    exit_with(told["ok"])


def _say(sentence: str) -> None:
    err.print(sentence, markup=False, highlight=False)


def _env_spec(named: str) -> SealedSpec:
    if named.endswith((".yaml", ".yml")):
        return read_spec("env", Path(named))
    entry = named if ":" in named else f"gymnasium:{named}"
    return read_spec("env", {"entry": entry})


def _plan(env: SealedSpec, steps: int, seed: int) -> SessionPlan:
    session = SessionDocument(
        agent=SAMPLER, env=env.name, seed=seed, max_steps=steps, labels={"dsec": "determinism"}
    )
    agent = read_spec("agent", {"entry": SAMPLER})
    return SessionPlan(session, agent, env, read_reward("env", Path()))


async def _validate(plan: SessionPlan, sessions: int, kill_worker: bool) -> dict[str, Any]:
    began = monotonic()
    async with some_client(_say) as (client, _):
        told = await _run(client, plan, sessions, kill_worker)
    told["seconds"] = round(monotonic() - began, 1)
    return told


async def _run(
    client: Client, plan: SessionPlan, sessions: int, kill_worker: bool
) -> dict[str, Any]:
    killer = WorkerKiller()
    if kill_worker:
        await killer.arm(client)
    group = await client.request(plan, count=sessions, seeds="same")
    killer.aim(group.session_ids)
    outcome = await follow(client, group.session_ids, _say)
    # An environment with an end of its own (`episodes_max`) may take fewer steps than asked for.
    steps = outcome.summaries[0].steps
    same = await identical_at_every_step(client, group.session_ids, steps)
    identical, verified = same == sessions, outcome.verified == sessions
    return {
        "ok": identical and verified and outcome.rscr == 1.0,
        "sessions": sessions,
        "steps": steps,
        "identical": identical,
        "verified": verified,
        "rscr": outcome.rscr,
        "worker_killed": killer.killed is not None,
        "sessions_identical": same,
        "sessions_verified": outcome.verified,
        "chain_hash": outcome.summaries[0].chain_hash,
        "session_ids": list(group.session_ids),
        "problems": problems(outcome),
    }


def _print(env: str, told: dict[str, Any]) -> None:
    verdict = "is deterministic" if told["ok"] else "is NOT deterministic"
    click.echo(
        f"{env} {verdict}: {told['sessions_identical']} of {told['sessions']} sessions are equal "
        f"at each of {told['steps']} steps, {told['sessions_verified']} verify, "
        f"rscr {told['rscr']}, {told['seconds']} s"
    )
    for problem in told["problems"]:
        click.echo(f"  {problem}")
