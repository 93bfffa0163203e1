"""`dsec env`: where a program of one's own reaches the stack, passwords included.

`dsec status` shows no password, so that it can be pasted anywhere; this command is for those who
ask for them.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from dsec.cli.answer import answers, json_option, say_json
from dsec.cli.stack import state_dir_option
from dsec.client.endpoints import find_endpoints


@click.command()
@state_dir_option
@json_option
@answers
def env(state_dir: Path | None, as_json: bool) -> None:
    """Print the variables by which clients find the stack, passwords included: eval "$(dsec env)".

    On NATS they are a client's: it may request and cancel sessions, register specs, publish
    policies, and read.
    """
    found = find_endpoints(state_dir)
    variables = {
        "DSEC_NATS_URL": found.nats_url,
        "DSEC_DATABASE_URL": found.database_url,
        "DSEC_OBJECT_STORE_URL": found.object_store_url,
    }
    if as_json:
        say_json(variables)
        return
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")
