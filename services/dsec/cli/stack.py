"""`dsec up` and `down`: the embedded stack."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from dsec.cli.answer import Refused, answers, err, json_option, say_json
from dsec.cli.state_dir import state_dir_option
from dsec.cli.status import status_json
from dsec.platform.stack import StackOptions, default_state_dir, stack_status, stop_stack

STOP_WAIT_S = 60.0
READY = "ready"
URL_VARIABLES = {
    name: f"DSEC_UP_{name.upper()}" for name in ("nats_url", "database_url", "object_store_url")
}
"""Options that may hold a password, and where else they may be given: everybody on a machine can
read a process's arguments, and only its owner its environment. They are not the variables that
clients read, or `up` would take a client's servers for the ones to use."""


@click.command()
@click.option("--detach", is_flag=True, help="Return when it is up; `dsec down` stops it.")
@state_dir_option
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    help="Worker processes.  [default: one a core, at most 8]",
)
@click.option(
    "--nats-url",
    envvar=URL_VARIABLES["nats_url"],
    show_envvar=True,
    help="Use this NATS server instead of starting one.",
)
@click.option(
    "--database-url",
    envvar=URL_VARIABLES["database_url"],
    show_envvar=True,
    help="Use this PostgreSQL instead of starting one.",
)
@click.option(
    "--object-store-url",
    envvar=URL_VARIABLES["object_store_url"],
    show_envvar=True,
    help="Use this object store (file:///directory or s3://bucket/prefix?endpoint=URL&region=NAME).",
)
@click.option("--nats-port", type=click.IntRange(1, 65535), help="For the embedded NATS.")
@click.option("--postgres-port", type=click.IntRange(1, 65535), help="For the embedded PostgreSQL.")
@click.option(
    "--sync-interval",
    default="1s",
    show_default=True,
    help="How often NATS syncs its stream to disk; `always` leaves no window at a power failure.",
)
@click.option(
    "--timescaledb",
    is_flag=True,
    help="PostgreSQL with TimescaleDB, fetched once from Debian's or Ubuntu's packages into the "
    "state directory; nothing is installed on the system.",
)
@click.option("--ready-fd", type=int, hidden=True)
@json_option
@answers
def up(detach: bool, as_json: bool, ready_fd: int | None, **chosen: Any) -> None:
    """Start the embedded stack: NATS, PostgreSQL and all services. Ctrl-C stops it."""
    chosen["state_dir"] = (chosen["state_dir"] or default_state_dir()).expanduser().absolute()
    if detach:
        _up_detached(chosen, as_json)
        return
    for variable in URL_VARIABLES.values():
        os.environ.pop(variable, None)  # they have been read, and children need not know them
    workers = chosen.pop("workers")
    asyncio.run(_up(StackOptions(**chosen), workers, as_json, ready_fd))


async def _up(
    options: StackOptions, workers: int | None, as_json: bool, ready_fd: int | None
) -> None:
    from dsec.cli import services
    from dsec.env_runtime.settings import EnvRuntimeSettings
    from dsec.platform.stack import Stack
    from dsec.scheduler.settings import ConfigError, load_config

    try:
        config = load_config(services.scheduler_config_path(options.state_dir))
    except ConfigError as error:
        raise Refused(str(error)) from error
    beat_s, limit_s = EnvRuntimeSettings().heartbeat_period_s, config.heartbeat_limit_s
    if 2 * beat_s > limit_s:
        raise Refused(
            f"DSEC_HEARTBEAT_PERIOD_S is {beat_s:g} and heartbeat_limit_s is {limit_s:g}: every "
            "worker would be taken for dead between two heartbeats. Set heartbeat_limit_s in "
            f"{services.CONFIG_FILE} to {4 * beat_s:g}, or the period to {limit_s / 4:g}"
        )
    options = replace(options, services=services.service_commands())
    async with Stack(options, on_progress=_say) as stack:
        await services.start(stack, options.state_dir, workers, _say)
        if ready_fd is not None:
            _write(ready_fd, READY)
            os.close(ready_fd)
        else:
            _say_up(options.state_dir, as_json)
            _say("Ctrl-C stops it.")
        await stack.wait()
        _say("Stopping …")
    _say(f"The stack on {options.state_dir} is down.")


def _say(sentence: str) -> None:
    """Progress goes to standard error, which is a log file once nobody waits for us."""
    click.echo(sentence, err=True)


def _write(descriptor: int, word: str) -> None:
    try:
        os.write(descriptor, f"{word}\n".encode())
    except BrokenPipeError:
        click.echo("Nobody waits for this stack to be up; it runs.", err=True)


def _up_detached(chosen: dict[str, Any], as_json: bool) -> None:
    """Run `up` in a process of its own that outlives this one, and wait until it is up."""
    state_dir: Path = chosen["state_dir"]
    _refuse_second(state_dir)
    try:
        (state_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{state_dir} cannot be made: {error.strerror or error}") from error
    log_path = state_dir / "logs" / "up.log"
    read_end, write_end = os.pipe()
    argv, env = _detached_command(chosen, write_end)
    with log_path.open("wb") as log_file:
        child = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            pass_fds=(write_end,),
            start_new_session=True,
        )
    os.close(write_end)
    if not err.is_terminal:
        _say("Starting the stack …")
    with err.status("Starting the stack …"), os.fdopen(read_end) as pipe:
        word = pipe.readline().strip()
    if word != READY:
        child.wait()
        told = log_path.read_text(errors="replace").strip().splitlines()
        reason = told[-1].removeprefix("Error: ") if told else "it said nothing"
        raise Refused(f"{reason} (the whole story is in {log_path})")
    _say_up(state_dir, as_json)


def _refuse_second(state_dir: Path) -> None:
    supervisor = stack_status(state_dir).supervisor
    if supervisor is not None and supervisor.alive:
        raise Refused(
            f"A stack is already up on {state_dir} (process {supervisor.pid}): use it, `dsec "
            "status` shows what runs; or stop it with `dsec down`"
        )


def _detached_command(chosen: dict[str, Any], ready_fd: int) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of the process that runs `up`."""
    argv = [sys.executable, "-m", "dsec.cli", "up", "--ready-fd", str(ready_fd)]
    env = dict(os.environ)
    for name, value in chosen.items():
        if value is None:
            continue
        if name in URL_VARIABLES:
            env[URL_VARIABLES[name]] = str(value)
        elif isinstance(value, bool):
            argv += [f"--{name.replace('_', '-')}"] if value else []
        else:
            argv += [f"--{name.replace('_', '-')}", str(value)]
    return argv, env


def _say_up(state_dir: Path, as_json: bool) -> None:
    status = stack_status(state_dir)
    if as_json:
        say_json({"ok": True, **status_json(status)})
        return
    click.echo(f"DSec is up on {state_dir}. Try `dsec demo`, or `dsec init DIR`.")


@click.command()
@state_dir_option
@json_option
@answers
def down(state_dir: Path | None, as_json: bool) -> None:
    """Stop the embedded stack. Its data stay."""
    folder = state_dir or default_state_dir()
    result = asyncio.run(stop_stack(folder, STOP_WAIT_S))
    if as_json:
        say_json({"ok": True, "state_dir": folder, **asdict(result)})
        return
    if result.killed:
        click.echo(f"The stack on {folder} did not stop in {STOP_WAIT_S:.0f} s and was killed.")
    elif result.was_running:
        click.echo(f"The stack on {folder} is down.")
    else:
        click.echo(f"No stack was running on {folder}.")
    for leftover in result.ended_leftovers:
        click.echo(f"Ended {leftover}, left by an earlier run.")
    if result.note is not None:
        click.echo(f"It is stopped. {result.note}")
