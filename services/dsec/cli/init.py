"""`dsec init DIR`: a working agent, environment, reward and session to start from."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import click

from dsec.cli.answer import Refused, answers, json_option, say_json

TEMPLATES = ("agent.py", "agent_spec.yaml", "env_spec.yaml", "reward.py", "session.yaml")


def template_text(name: str) -> str:
    """The text of one template."""
    with as_file(files("dsec.cli") / "templates" / name) as path:
        return path.read_text(encoding="utf-8")


def write_templates(folder: Path) -> list[Path]:
    """Write the working set. Nothing is overwritten.

    Raises:
        Refused: a file is there already, or the folder cannot be written.
    """
    there = [name for name in TEMPLATES if (folder / name).exists()]
    if there:
        raise Refused(
            f"{folder} already has {', '.join(there)}: nothing was written; choose another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in TEMPLATES:
            (folder / name).write_text(template_text(name), encoding="utf-8")
    except OSError as error:
        raise Refused(f"{folder} cannot be written: {error.strerror or error}") from error
    return [folder / name for name in TEMPLATES]


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@json_option
@answers
def init(folder: Path, as_json: bool) -> None:
    """Write a working agent, environment, reward and session into DIR."""
    written = write_templates(folder)
    if as_json:
        say_json({"ok": True, "directory": folder, "files": [str(path) for path in written]})
        return
    for path in written:
        click.echo(path)
    click.echo(f"\nNext: dsec run {folder / 'session.yaml'} --count 8 --follow")
