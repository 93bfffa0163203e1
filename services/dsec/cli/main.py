"""The `dsec` command: a group whose commands are imported when they are called.

`dsec --help` must answer at once, so this module knows only names, one-line helps and places.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any, NamedTuple, NoReturn

CODE_INTERRUPTED = 130


def interrupted() -> NoReturn:
    """The end of a command that nothing was done for yet."""
    sys.stderr.write("Interrupted.\n")
    sys.exit(CODE_INTERRUPTED)


try:
    import click
except KeyboardInterrupt:  # this import alone takes as long as the interpreter takes to start
    interrupted()

HELP_WIDTH = 100


class Place(NamedTuple):
    """Where a command is, and what its help says in one line."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "up": Place("stack", "up", "Start the embedded stack."),
    "down": Place("stack", "down", "Stop the embedded stack."),
    "status": Place("status", "status", "Show what runs, and how it is set."),
    "env": Place("env", "env", "Print the URLs for programs of your own, passwords included."),
    "demo": Place("demo", "demo", "Run twenty sessions, kill a worker, check every step."),
    "validate-determinism": Place(
        "determinism", "validate_determinism", "Run equal sessions and compare every step."
    ),
    "init": Place("init", "init", "Write a working agent, environment, reward and session."),
    "specs": Place("specs", "specs", "Register and look at specs."),
    "run": Place("run", "run", "Request sessions."),
    "sessions": Place("sessions", "sessions", "List, show and cancel sessions."),
    "why": Place("why", "why", "Walk the causes of one event."),
    "replay": Place("replay", "replay", "Show the recorded state; runs no user code."),
    "verify": Place("replay", "verify", "Re-execute a session and compare with its log."),
    "diff": Place("replay", "diff", "Find the first difference of two sessions."),
    "compare": Place("compare", "compare", "Compare two agents over paired seeds."),
    "rescore": Place("rescore", "rescore", "Score ended sessions anew, by another function."),
    "metrics": Place("metrics", "metrics", "Show metrics, computed from the log."),
    "anchors": Place("anchors", "anchors", "Look at captured state, and check it."),
    "tools": Place("tools", "tools", "Look at tools and their calls."),
    "policy-sanity-check": Place(
        "sanity", "policy_sanity_check", "Hold what agents say of their decisions against the log."
    ),
    "services": Place("outside", "services", "Declare and look at outside services."),
    "doctor": Place("doctor", "doctor", "Say what this machine and its servers lack."),
    "export": Place("export", "export", "Write episodes as Parquet, Minari or JSON lines."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called."""

    def invoke(self, ctx: click.Context) -> Any:
        """Click's. Whoever interrupts while the command is imported hears what `answers` says of
        interrupts, and not of an abort."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            interrupted()
        except click.NoSuchOption as unknown:
            if unknown.option_name != "--state-dir":
                raise
            where = "The variable DSEC_STATE_DIR says where the stack is."
            raise click.UsageError(f"{unknown.format_message()} {where}", unknown.ctx) from unknown

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order in which people meet them."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click's, with a word on what was meant: it knows no names of commands that are lazy."""
        name = args[0]
        if name in COMMANDS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        # That takes the import of every command; whoever mistypes has the time.
        inner = [f"{group} {name}" for group in COMMANDS if self._has(ctx, group, name)]
        meant = inner or difflib.get_close_matches(name, COMMANDS, n=3)
        raise click.UsageError(f"No such command {name!r}.{_did_you_mean(meant)}", ctx)

    def _has(self, ctx: click.Context, group: str, name: str) -> bool:
        found = self.get_command(ctx, group)
        return isinstance(found, click.Group) and name in found.commands

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module = importlib.import_module(f"dsec.cli.{place.module}")
        command: click.Command = getattr(module, place.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The one-line helps, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.help) for name, place in COMMANDS.items()])


def _did_you_mean(names: list[str]) -> str:
    if not names:
        return " `dsec --help` lists them."
    return f" Did you mean {' or '.join(f'`dsec {name}`' for name in names)}?"


@click.group(cls=LazyGroup, context_settings={"max_content_width": HELP_WIDTH})
@click.version_option(package_name="dsec", message="%(version)s")
def main() -> None:
    """DSec: deterministic, event-sourced agent training.

    Every command takes --json, and exits other than 0 when the answer is no.
    """
