"""`dsec services`: declare the outside services that reward functions ask, and look at them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from dsec.cli.answer import answers, json_option, number, run_async, say_json
from dsec.cli.tables import plain_table, print_table
from dsec.client.client import Client
from dsec.client.services_file import declare as declare_service
from dsec.client.services_file import read_services
from dsec.platform.budget import Ledger, spacing_s
from dsec.platform.bus import Bucket
from dsec.platform.bus.retry import LOOKING
from dsec.platform.permits import key_of as budget_key
from dsec.platform.permits import read_ledger
from dsec.platform.roles import SERVICES_BUCKET
from dsec.reward.declarations import newest
from dsec.reward.standing import key_of as standing_key
from dsec.reward.standing import read_standing
from dsec.reward.switch import Standing, fresh
from dsec_contracts.service import ServiceFact


@click.group()
def services() -> None:
    """Declare and look at outside services."""


@services.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@answers
def declare(file: Path, as_json: bool) -> None:
    """Declare the services of a services.yaml, for all sessions."""
    wanted = read_services(file)

    async def work() -> list[dict[str, Any]]:
        async with Client(name="cli") as client:
            bus, log = await client.bus(), await client.log()
            told = []
            for name, terms in wanted.items():
                version, new = await declare_service(bus, log, name, terms, "cli")
                told.append({"name": name, "version": version, "declared": new})
            return told

    found = run_async(work())
    if as_json:
        say_json(found)
        return
    for one in found:
        how = "declared" if one["declared"] else "as it was"
        click.echo(f"{one['name']} version {one['version']}: {how}")


@services.command("list")
@json_option
@answers
def list_(as_json: bool) -> None:
    """List declared services."""

    async def work() -> list[ServiceFact]:
        async with Client(name="cli") as client:
            return _sorted(await _declared(client))

    found = run_async(work())
    if as_json:
        say_json([fact.model_dump(mode="json") for fact in found])
        return
    numbers = ("version", "qps", "concurrency", "deadline s")
    table = plain_table("service", *numbers, "base url", right=numbers)
    for fact in found:
        table.add_row(
            fact.name,
            str(fact.version),
            number(fact.qps_budget),
            str(fact.concurrency_max),
            number(fact.deadline_s),
            fact.base_url,
        )
    print_table(table, empty="No services: `dsec services declare services.yaml` declares some.")


@services.command()
@json_option
@answers
def status(as_json: bool) -> None:
    """Show each service now: budget, p95, mode, calls under way."""

    async def work() -> list[dict[str, Any]]:
        async with Client(name="cli") as client:
            bus = await client.bus(LOOKING)
            bucket = await bus.existing_bucket(SERVICES_BUCKET)
            return [await _status(fact, bucket) for fact in _sorted(await _declared(client))]

    found = run_async(work())
    if as_json:
        say_json(found)
        return
    numbers = ("qps", "p95 ms", "in flight", "waiting", "replicas")
    table = plain_table("service", "mode", *numbers, "left alone for", right=numbers)
    for row in found:
        table.add_row(
            row["name"],
            row["mode"],
            number(row["qps_effective"]),
            number(row["p95_ms"]),
            str(row["in_flight"]),
            str(row["waiting"]),
            str(row["replicas"]),
            f"{row['left_alone_s']:.1f} s" if row["left_alone_s"] else "",
        )
    print_table(table, empty="No services: `dsec services declare services.yaml` declares some.")


async def _declared(client: Client) -> dict[str, ServiceFact]:
    return newest(await (await client.log()).service_declarations())


def _sorted(found: dict[str, ServiceFact]) -> list[ServiceFact]:
    return [found[name] for name in sorted(found)]


async def _status(fact: ServiceFact, bucket: Bucket | None) -> dict[str, Any]:
    """What replicas say of a service; nothing where none has asked it lately."""
    now = time.time()
    standing, ledger = Standing(), Ledger()
    if bucket is not None:
        standing = read_standing((await bucket.get(standing_key(fact.name))).value)
        ledger = read_ledger((await bucket.get(budget_key(fact.name))).value)
    reports = fresh(standing.reports, now)
    since = datetime.fromtimestamp(standing.since, UTC).isoformat() if standing.since else None
    return {
        "name": fact.name,
        "version": fact.version,
        "mode": standing.mode,
        "since": since,
        "qps_budget": fact.qps_budget,
        "qps_effective": round(1 / spacing_s(fact.qps_budget), 4),
        "latency_switch_ms": fact.latency_switch_ms,
        "p95_ms": standing.p95_ms(now),
        "in_flight": sum(report.in_flight for report in reports.values()),
        "waiting": sum(report.waiting for report in reports.values()),
        "replicas": len(reports),
        "left_alone_s": max(0.0, ledger.closed_until - now),
    }
