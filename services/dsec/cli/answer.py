"""How commands answer: JSON or text on standard output, one sentence on standard error, a code.

A mistake of the user's is one sentence that says what, where and what to do; a traceback is for
our own mistakes. This is the one place that knows which errors are which.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsec.cli.main import CODE_INTERRUPTED

T = TypeVar("T")
PIPE_WIDTH = 200
"""Nobody folds a table that another program reads."""
CODE_NO = 1
UNDEFINED = ("42P01", "42703")
"""What PostgreSQL says of a table, and of a column, that is not there."""

out = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(stderr=True)

json_option = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")


class Refused(click.ClickException):
    """The answer is no, for a reason that one sentence tells."""

    exit_code = CODE_NO


def answers(command: Callable[..., T]) -> Callable[..., T]:
    """Turn the errors that users can cause into one sentence and exit code 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> T:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            told = f"Interrupted. {interrupt}".rstrip()
            err.print(told, markup=False, highlight=False, soft_wrap=True)
            sys.exit(CODE_INTERRUPTED)
        except Exception as error:
            sentence = _sentence(error)
            if sentence is None:
                raise
            raise Refused(sentence) from error

    return wrapped


def _sentence(error: BaseException) -> str | None:
    """What to tell the user, or None where the error is ours."""
    if isinstance(error, BaseExceptionGroup):
        return _sentence(error.exceptions[0])
    if isinstance(error, click.ClickException | click.exceptions.Exit):
        return None
    # Imported here: by the time something failed, the command has them loaded anyway.
    from sqlalchemy.exc import ProgrammingError, SQLAlchemyError

    from dsec.client.endpoints import ClientError
    from dsec.client.yaml_file import SpecFileError
    from dsec.platform.bus import BusError
    from dsec.platform.db import POOLED, POOLED_SQLSTATES, DatabaseError
    from dsec.platform.log import LogBehind, LogUnavailable
    from dsec.platform.objects import ObjectStoreError
    from dsec.platform.settings import SettingsError
    from dsec.platform.stack import StackError

    known = (ClientError, SpecFileError, BusError, DatabaseError, ObjectStoreError, StackError)
    if isinstance(error, (*known, LogBehind, LogUnavailable, SettingsError)):
        return str(error)
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    if isinstance(error, ProgrammingError) and state in UNDEFINED:
        return "the database has no log of this version: `dsec up` brings it there"
    if state in POOLED_SQLSTATES:
        return POOLED
    if isinstance(error, SQLAlchemyError | ConnectionError | TimeoutError):
        detail = str(getattr(error, "orig", None) or error) or type(error).__name__
        return f"the log cannot be read ({detail.splitlines()[0]}): {_database_advice()}"
    if isinstance(error, OSError) and error.strerror:
        # A file or stream of the user's: a full disk, a folder without rights, an impossible name.
        return ": ".join([*([str(error.filename)[:256]] if error.filename else []), error.strerror])
    return None


def _database_advice() -> str:
    from dsec.doctor.hiding import shown

    url = os.environ.get("DSEC_DATABASE_URL")
    if not url:
        return "see `dsec status`"
    return f"is PostgreSQL running at {shown(url)}, which DSEC_DATABASE_URL names?"


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine on the fast loop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def say_json(value: Any) -> None:
    """One JSON document on standard output. NaN and infinities become null: JSON has none."""
    click.echo(json.dumps(_plain(value), indent=2, default=str, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value


def progress() -> Progress:
    """A progress display on standard error, silent where nobody watches."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


def exit_with(ok: bool) -> None:
    """Exit 0 for yes, 1 for no."""
    sys.exit(0 if ok else CODE_NO)


def number(value: float | None) -> str:
    """A reward as people read it."""
    return "-" if value is None else f"{value:.6g}"
