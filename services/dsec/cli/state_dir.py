"""`--state-dir`: which embedded stack a command is for."""

from __future__ import annotations

from pathlib import Path

import click

state_dir_option = click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the stack keeps its data.  [default: DSEC_STATE_DIR or ~/.local/share/dsec]",
)
