"""Train REINFORCE on CartPole-v1 with DSec sessions as rollouts.

    dsec up --detach
    python -m dsec.examples.reinforce

Each iteration publishes the weights, requests a group of sessions pinned to them, reads their
episodes in columns and updates. At the end the learning curve is read back by SQL alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click
import numpy as np
import torch
from sqlalchemy import text

import dsec
from dsec.examples.reinforce.agent import make_network
from dsec.examples.reinforce.learner import Learner
from dsec.platform.engine import async_engine

HERE = Path(__file__).parent
SOLVED_RETURN = 195.0
CURVE = """
select (labels ->> 'iteration')::int as iteration, count(*) as episodes,
       avg(reward_total) as mean_return
from session_summary
where labels ->> 'experiment' = :experiment
group by 1 order by 1
"""


async def train(experiment: str, iterations: int, batch: int, seed: int) -> bool:
    """Train until a batch has a mean return of `SOLVED_RETURN`. True if it came to that."""
    torch.manual_seed(seed)
    network = make_network(hidden=64)
    learner = Learner(network)
    async with dsec.Client() as client:
        for iteration in range(iterations):
            version = await client.publish_policy("cartpole", network.state_dict())
            group = await client.request(
                HERE / "session.yaml",
                policy=version,
                count=batch,
                seed=seed + iteration * batch,
                labels={"experiment": experiment, "iteration": str(iteration)},
            )
            episodes = [episode async for episode in client.episodes(group=group)]
            failed = [episode for episode in episodes if episode.status != "completed"]
            if failed:
                raise click.ClickException(
                    f"session {failed[0].session_id} ended {failed[0].code}: "
                    f"see `dsec sessions show {failed[0].session_id}`"
                )
            mean = float(np.mean([episode.rewards.sum() for episode in episodes]))
            click.echo(f"iteration {iteration:3d}  mean return {mean:6.1f}", err=True)
            if mean >= SOLVED_RETURN:
                return True
            learner.learn(episodes)
    return False


async def curve(database_url: str, experiment: str) -> list[dict[str, float]]:
    """The learning curve, from SQL alone."""
    engine = async_engine(database_url)
    async with engine.connect() as connection:
        rows = await connection.execute(text(CURVE), {"experiment": experiment})
        result = [dict(row._mapping) for row in rows]
    await engine.dispose()
    return [{name: float(value) for name, value in row.items()} for row in result]


async def _run(experiment: str, iterations: int, batch: int, seed: int, as_json: bool) -> bool:
    solved = await train(experiment, iterations, batch, seed)
    async with dsec.Client() as client:
        rows = await curve(client.database_url, experiment)
    if as_json:
        click.echo(json.dumps({"ok": solved, "experiment": experiment, "curve": rows}))
        return solved
    click.echo("\nThe learning curve, from SQL over the log:\n" + CURVE)
    for row in rows:
        bar = "#" * int(row["mean_return"] / 10)
        click.echo(f"{row['iteration']:4.0f} {row['mean_return']:7.1f} {bar}")
    return solved


@click.command()
@click.option("--experiment", default="reinforce-cartpole", show_default=True, help="a label")
@click.option("--iterations", default=60, show_default=True)
@click.option("--batch", default=32, show_default=True, help="sessions an iteration")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(experiment: str, iterations: int, batch: int, seed: int, as_json: bool) -> None:
    """Train REINFORCE on CartPole-v1; exit 0 when it is solved."""
    solved = asyncio.run(_run(experiment, iterations, batch, seed, as_json))
    sys.exit(0 if solved else 1)


if __name__ == "__main__":
    main()
