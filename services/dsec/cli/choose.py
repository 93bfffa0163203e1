"""Options by which commands choose sessions: the same words for the same thing everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def group_option(help_: str) -> Callable[[F], F]:
    """`--group`, also as `--group-id`, which is its name in session files and in the log."""
    return click.option("--group", "--group-id", "group_id", metavar="ID", help=help_)


def session_option(help_: str) -> Callable[[F], F]:
    """`--session`, as often as there are sessions: the parameter `named`."""
    return click.option("--session", "named", multiple=True, metavar="ID", help=help_)


def label_option(help_: str) -> Callable[[F], F]:
    """`--label KEY=VALUE`, as often as there are labels: the parameter `labels`, a dictionary."""
    return click.option(
        "--label", "labels", multiple=True, callback=_labels, metavar="KEY=VALUE", help=help_
    )


def _labels(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    labels = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is no label: write it as KEY=VALUE")
        labels[key] = value
    return labels
