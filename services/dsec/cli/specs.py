"""`dsec specs`: register, list, show."""

from __future__ import annotations

from typing import Any

import click

from dsec.cli.answer import Refused, answers, json_option, run_async, say_json
from dsec.cli.tables import as_yaml, plain_table, print_table
from dsec.client.client import Client
from dsec.client.specs import read_spec
from dsec.session.documents import unseal

KINDS = ("agent", "env", "reward", "tool")


@click.group()
def specs() -> None:
    """Register and look at specs."""


@specs.command()
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("source")
@click.option("--no-check", is_flag=True, help="Do not load or try it out first.")
@click.option("--env", help="For a reward: an env_spec.yaml, on whose steps it is tried out.")
@json_option
@answers
def register(kind: str, source: str, no_check: bool, env: str | None, as_json: bool) -> None:
    """Register a spec and print its hash.

    SOURCE is a YAML file, or for a reward `env` or FILE.py:FUNCTION.
    """
    spec = read_spec(kind, source)
    if env is not None and kind != "reward":
        raise Refused("--env is for a reward: it is tried out on that environment's steps")
    if env is not None and not no_check:
        from dsec.client.check_reward import check_reward  # loads Gymnasium

        check_reward(spec, read_spec("env", env))

    async def work() -> str:
        async with Client(name="cli") as client:
            return await client.register_sealed(spec, check=not no_check)

    spec_hash = run_async(work())
    if as_json:
        say_json({"ok": True, "spec_hash": spec_hash, "kind": kind, "files": sorted(spec.files)})
    else:
        click.echo(spec_hash)


@specs.command("list")
@click.option("--kind", type=click.Choice(KINDS))
@json_option
@answers
def list_(kind: str | None, as_json: bool) -> None:
    """List registered specs, the newest first."""

    async def work() -> list[dict[str, Any]]:
        async with Client(name="cli") as client:
            rows = await client.queries.rows(
                "select spec_hash, kind, name, registered_at from spec "
                "where cast(:kind as text) is null or kind = :kind order by registered_at desc",
                kind=kind,
            )
            return [dict(row._mapping) for row in rows]

    found = run_async(work())
    if as_json:
        say_json(found)
        return
    table = plain_table("hash", "kind", "name", "registered")
    for spec in found:
        at = spec["registered_at"].strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(spec["spec_hash"], spec["kind"], spec["name"] or "", at)
    print_table(table, empty="No specs: `dsec run` and `dsec specs register` register some.")


@specs.command()
@click.argument("spec_hash")
@json_option
@answers
def show(spec_hash: str, as_json: bool) -> None:
    """Show one spec: its document and the files that travel with it."""

    async def work() -> tuple[str, str, Any, dict[str, bytes]]:
        async with Client(name="cli") as client:
            log = await client.log()
            known = await log.known_specs()
            found = [h for h in known if h.startswith(spec_hash.lower())]
            if len(found) != 1:
                raise Refused(
                    f"{len(found)} registered specs begin with {spec_hash}: "
                    "`dsec specs list` shows them"
                )
            content = await log.spec(found[0])
            assert content is not None
            data = content.content or client.objects().get(content.blob or "")
            document, files = unseal(data, content.kind)
            return found[0], content.kind, document, files

    full, kind, document, files = run_async(work())
    told: dict[str, Any] = {
        "spec_hash": full,
        "kind": kind,
        "document": document.model_dump(mode="json"),
        "files": {name: len(data) for name, data in sorted(files.items())},
    }
    if as_json:
        say_json(told)
        return
    click.echo(f"# {kind} {full}")
    click.echo(as_yaml(told["document"]))
    for name, size in told["files"].items():
        click.echo(f"# ships {name}: {size} bytes")
