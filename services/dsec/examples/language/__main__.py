"""Run the language agent on the local stand-in for a model server.

    dsec up --detach
    python -m dsec.examples.language

For a real model change `url`, `model` and, where it wants one, `api_key` in `model.yaml`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import click

import dsec
from dsec.client.endpoints import ClientError
from dsec.examples.language.model_server import serve

HERE = Path(__file__).parent
PORT = 8765
"""As `model.yaml` has it."""


async def run(count: int) -> bool:
    """Run sessions and tell what came of each. True if all answers are right."""
    right = 0
    async with dsec.Client() as client:
        group = await client.request(HERE / "session.yaml", count=count)
        async for episode in client.episodes(group=group):
            asked, answered = episode.observations[0], episode.actions[0]
            click.echo(f"{asked} {answered}  (reward {episode.rewards[0]:g})")
            right += float(episode.rewards[0]) == 1.0
    return right >= count


@click.command()
@click.option("--count", default=4, show_default=True, help="Sessions.")
def main(count: int) -> None:
    """Ask a warehouse for its stocks, through a model and a tool."""
    try:
        server = serve(PORT)
    except OSError as error:
        raise click.ClickException(
            f"the model's server cannot listen on port {PORT}, which model.yaml names: {error}"
        ) from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    click.echo(f"{count} sessions ask a model on port {PORT}, and it asks for the tool `stock`.")
    try:
        sys.exit(0 if asyncio.run(run(count)) else 1)
    except ClientError as error:
        raise click.ClickException(str(error)) from error
    finally:
        server.shutdown()


if __name__ == "__main__":
    main()
