"""`dsec status`: what of the embedded stack runs, and how it is set."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from dsec.cli.answer import answers, exit_with, json_option, out, say_json
from dsec.cli.state_dir import state_dir_option
from dsec.cli.tables import plain_table, print_table
from dsec.doctor.hiding import shown
from dsec.platform.stack import Endpoints, StackStatus, default_state_dir, stack_status


@click.command()
@state_dir_option
@json_option
@answers
def status(state_dir: Path | None, as_json: bool) -> None:
    """Show what runs, and the effective scheduler.config.yaml. Exits 0 if all of it runs and the
    log gets on."""
    found = stack_status(state_dir or default_state_dir())
    config = _scheduler_config(found.state_dir)
    storage = _storage_sentence(found)
    if found.state == "running" and found.endpoints is not None:
        from dsec.cli.standstill import standstill

        still = None if found.problem else asyncio.run(standstill(found.endpoints.nats_url))
        found = replace(found, problem=found.problem or still)
    well = found.state == "running" and not found.problem
    aside, told = _put_aside(found) if well else (None, [])
    if as_json:
        more = {"log_storage": storage, "put_aside": aside, "scheduler_config": config}
        say_json({**status_json(found), **more})
        exit_with(well)
    out.print(f"The stack on {found.state_dir} is [bold]{found.state}[/bold].", soft_wrap=True)
    if found.problem:
        out.print(found.problem, soft_wrap=True)
    if found.processes:
        _print_processes(found)
    if found.endpoints is not None:
        out.print(f"NATS        {shown(found.endpoints.nats_url)}", soft_wrap=True)
        out.print(f"PostgreSQL  {shown(found.endpoints.database_url)}", soft_wrap=True)
        out.print(f"objects     {found.endpoints.object_store_url}", soft_wrap=True)
    if storage is not None:
        out.print(storage, soft_wrap=True, highlight=False)
    for sentence in told:
        out.print(sentence, soft_wrap=True, markup=False, highlight=False)
    import yaml

    out.print("\nscheduler.config.yaml, as it is in effect:")
    out.print(yaml.safe_dump(config, sort_keys=False).rstrip(), highlight=False)
    exit_with(well)


def _storage_sentence(found: StackStatus) -> str | None:
    """How the log is kept, while there is a stack to ask."""
    if found.endpoints is None or found.state == "stopped":
        return None
    from dsec.platform.db import DatabaseError
    from dsec.platform.storage import log_storage

    try:
        storage = log_storage(found.endpoints.database_url)
    except DatabaseError as error:
        return f"How the log is kept cannot be said: {error}"
    return storage.sentence() if storage is not None else None


def _put_aside(found: StackStatus) -> tuple[dict[str, dict[str, int]] | None, list[str]]:
    """What is not in the log, by where it is, and the same in sentences."""
    assert found.endpoints is not None, "of a stack that runs"
    from dsec.cli.put_aside import put_aside, sentences
    from dsec.platform.bus import BusError
    from dsec.platform.db import DatabaseError

    try:
        aside = put_aside(found.endpoints.nats_url, found.endpoints.database_url)
    except (BusError, DatabaseError) as error:
        return None, [f"What was put aside cannot be said: {error}"]
    return aside, sentences(aside)


def _scheduler_config(state_dir: Path) -> Any:
    from dsec.cli.services import scheduler_config_path
    from dsec.scheduler.settings import ConfigError, load_config

    try:
        return load_config(scheduler_config_path(state_dir)).model_dump(mode="json")
    except ConfigError as error:
        return {"error": str(error)}


def _print_processes(found: StackStatus) -> None:
    table = plain_table("process", "pid", "since", "log")
    for process in found.processes:
        since = datetime.fromtimestamp(process.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        table.add_row(
            process.name,
            str(process.pid) if process.alive else "gone",
            since,
            process.log_path,
        )
    print_table(table, ("since",))


def status_json(found: StackStatus) -> dict[str, Any]:
    """What `--json` says of a stack, without users and passwords in its URLs."""
    return {
        "state": found.state,
        "state_dir": str(found.state_dir),
        "since": found.since,
        "endpoints": _shown_endpoints(found.endpoints),
        "processes": [asdict(process) for process in found.processes],
        "problem": found.problem,
    }


def _shown_endpoints(endpoints: Endpoints | None) -> dict[str, str] | None:
    """Without users and passwords, which `dsec env` prints."""
    if endpoints is None:
        return None
    return {name: shown(url) for name, url in asdict(endpoints).items()}
