"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from dsec.cli.answer import number, out
from dsec.client.queries import Summary

_COLOURS = {"completed": "green", "failed": "red", "rejected": "red", "cancelled": "yellow"}


def plain_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without lines; the columns of `right` are aligned right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def print_summaries(sessions: Iterable[Summary]) -> None:
    """Sessions, one a line."""
    table = plain_table(
        "session", "status", "code", "steps", "reward", "attempts", "chain",
        right=("steps", "reward", "attempts"),
    )  # fmt: skip
    for session in sessions:
        table.add_row(
            str(session.session_id),
            Text(session.status, style=_COLOURS.get(session.status, "")),
            session.code or "",
            str(session.steps),
            number(session.reward_total),
            str(session.attempts),
            session.chain_hash[:16],
        )
    out.print(table)
