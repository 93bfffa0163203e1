"""Commands whose names are taken and that do nothing yet: they say so, and exit 2."""

from __future__ import annotations

import sys

import click

from dsec.cli.answer import CODE_USAGE, say_json


def _reserved(name: str) -> click.Command:
    @click.command(
        name,
        help=f"Not implemented yet: `dsec {name}` is reserved.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    @click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(as_json: bool, arguments: tuple[str, ...]) -> None:
        message = f"`dsec {name}` is not implemented yet: its name is reserved for a later version"
        if as_json:
            say_json({"ok": False, "error": message})
        click.echo(f"Error: {message}", err=True)
        sys.exit(CODE_USAGE)

    return command


anchors = _reserved("anchors")
