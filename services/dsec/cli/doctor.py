"""`dsec doctor`: what this machine and its servers lack, in plain sentences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click
from rich.text import Text

from dsec.cli.answer import answers, err, exit_with, json_option, out, say_json

if TYPE_CHECKING:
    from dsec.doctor.finding import Result

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "absent": "dim"}


@click.command()
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Of the embedded stack.  [default: DSEC_STATE_DIR or ~/.local/share/dsec]",
)
@click.option(
    "--nats-monitor-url",
    envvar="DSEC_NATS_MONITOR_URL",
    show_envvar=True,
    help="The monitoring port of the NATS server, which says how it syncs (http://host:8222).",
)
@json_option
@answers
def doctor(state_dir: Path | None, nats_monitor_url: str | None, as_json: bool) -> None:
    """Examine this machine, and the servers that are given or that run here. Changes nothing.

    Servers come from DSEC_NATS_URL, DSEC_DATABASE_URL and DSEC_OBJECT_STORE_URL, otherwise from
    the embedded stack where it runs. Exits 1 if a check fails.
    """
    from dsec.doctor.checks import all_checks
    from dsec.doctor.finding import examine
    from dsec.doctor.hiding import Hidden
    from dsec.doctor.servers import find_servers
    from dsec.platform.stack.state import default_state_dir

    began = monotonic()
    servers = find_servers(state_dir or default_state_dir(), os.environ, nats_monitor_url)
    with err.status("Examining this machine …"):
        results = examine(all_checks(servers), Hidden(servers.urls()))
    ok = not any(result.status == "fail" for result in results)
    if as_json:
        say_json(
            {
                "ok": ok,
                "seconds": round(monotonic() - began, 1),
                "checks": [result.as_json() for result in results],
            }
        )
    else:
        _print(results)
    exit_with(ok)


def _print(results: Sequence[Result]) -> None:
    width = max(len(result.name) for result in results)
    for result in results:
        line = Text(f"{result.status:7}", style=_COLOURS[result.status])
        line.append(f"{result.name:{width}}  {result.sentence}", style="default")
        out.print(line, soft_wrap=True)
        if result.advice:
            out.print(f"{'':{7 + width}}  → {result.advice}", soft_wrap=True, markup=False)
    counted = {status: sum(r.status == status for r in results) for status in _COLOURS}
    told = ", ".join(f"{count} {status}" for status, count in counted.items() if count)
    out.print(f"\n{told}", markup=False)
