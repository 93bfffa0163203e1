"""`dsec env`: where a program of one's own reaches the stack, passwords included.

`dsec status` shows no password, so that it can be pasted anywhere; this command is for those who
ask for them.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from dsec.cli.answer import answers, json_option, say_json
from dsec.cli.state_dir import state_dir_option
from dsec.client.endpoints import ClientError, find_endpoints, stack_folder
from dsec.platform.stack import stack_status
from dsec.platform.stack.postgres import POSTGRES, owner_url
from dsec.platform.stack.state import StateDir


@click.command()
@state_dir_option
@click.option(
    "--owner",
    is_flag=True,
    help="The database's URL as its owner, who may change and drop everything in it.",
)
@json_option
@answers
def env(state_dir: Path | None, owner: bool, as_json: bool) -> None:
    """Print the variables by which clients find the stack, passwords included: eval "$(dsec env)".

    They are a client's: on NATS it may request and cancel sessions, register specs, publish
    policies, and read; in the embedded database it may read.
    """
    found = find_endpoints(state_dir)
    variables = {
        "DSEC_NATS_URL": found.nats_url,
        "DSEC_DATABASE_URL": _owner_url(state_dir) if owner else found.database_url,
        "DSEC_OBJECT_STORE_URL": found.object_store_url,
    }
    if as_json:
        say_json(variables)
        return
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _owner_url(state_dir: Path | None) -> str:
    """The embedded database's.

    Raises:
        ClientError: the stack's database is not ours.
    """
    folder = stack_folder(state_dir)
    status = stack_status(folder) if folder is not None else None
    ours = status is not None and any(one.name == POSTGRES for one in status.processes)
    if folder is None or status is None or status.endpoints is None or not ours:
        raise ClientError(
            "--owner is about the embedded database, and the servers here are named by variables "
            "or by `dsec up --database-url`: whoever gave that URL knows the owner"
        )
    return owner_url(status.endpoints.database_url, StateDir(folder).password())
