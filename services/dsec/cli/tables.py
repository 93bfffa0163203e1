"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dsec.cli.answer import err, number, out
from dsec.client.queries import Summary

TABLE_WIDTH_MAX = 10_000
"""Columns of a terminal; wider than any table is."""
_COLOURS = {"completed": "green", "failed": "red", "rejected": "red", "cancelled": "yellow"}


def plain_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without lines; the columns of `right` are aligned right."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def print_table(table: Table, less: Iterable[str] = (), *, empty: str | None = None) -> None:
    """Print a table that keeps every value whole: half an id can be given to no command.

    Args:
        less: the columns that a narrow terminal does without, the least needed first.
        empty: what to say of a table without rows.
    """
    if not table.row_count and empty is not None:
        out.print(empty, soft_wrap=True, markup=False, highlight=False)
        return
    left_out = []
    for name in less:
        if _width(table) <= out.width:
            break
        table.columns = [column for column in table.columns if column.header != name]
        left_out.append(name)
    table.width = _width(table)
    out.print(table, crop=False, soft_wrap=True)
    if left_out:
        err.print(
            f"(for want of width without {', '.join(left_out)}; --json has all)",
            highlight=False,
            soft_wrap=True,
        )


def _width(table: Table) -> int:
    """The columns of a terminal in which nothing is cut."""
    return Measurement.get(out, out.options.update_width(TABLE_WIDTH_MAX), table).maximum


def as_yaml(value: Any) -> str:
    """A mapping as a file of ours would say it: no braces, no Python."""
    import yaml

    text: str = yaml.safe_dump(
        value, sort_keys=False, default_flow_style=False, allow_unicode=True, width=2**16
    )
    return text.rstrip()


def print_fields(fields: Mapping[str, Any]) -> None:
    """Names and values, one a line; what is unknown or empty is left out."""
    for name, value in fields.items():
        if value is not None and value not in ("", [], {}):
            out.print(f"{name:16} {_field(value)}", soft_wrap=True, markup=False, highlight=False)


def _field(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_field(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return f"[{', '.join(_field(item) for item in value)}]"
    return str(value)


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
    print_table(table, ("attempts", "chain", "code", "steps"))
