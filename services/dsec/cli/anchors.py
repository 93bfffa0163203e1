"""`dsec anchors`: what was captured of sessions, and whether it can be had."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import click

from dsec.cli.answer import (
    Refused,
    answers,
    exit_with,
    json_option,
    out,
    progress,
    run_async,
    say_json,
)
from dsec.cli.collect import collect
from dsec.cli.find import find_session
from dsec.cli.tables import plain_table, print_fields, print_table
from dsec.client.client import Client
from dsec_contracts.keys import session_time

ANCHORS_MAX = 10_000
READS_IN_FLIGHT_MAX = 8
TAGS_SHOWN_CHARS = 40

_COLUMNS = (
    "session_id, position, anchor_id, tags, parent, status, code, size_bytes, blob, attempt,"
    " captured_at, stored_at, message, covers_agent, fold_version"
)
_NEWEST = f"select {_COLUMNS} from anchor order by captured_at desc, position desc limit :limit"
_OF_SESSION = (
    f"select {_COLUMNS} from anchor"
    " where session_id = :session_id and session_at = :session_at order by position limit :limit"
)

limit_option = click.option(
    "--limit",
    type=click.IntRange(1, ANCHORS_MAX),
    default=1000,
    show_default=True,
    help="At most so many; without a session the newest.",
)


@click.group()
def anchors() -> None:
    """Look at captured state, check that it can be loaded, and collect what is named nowhere."""


anchors.add_command(collect)


@anchors.command("list")
@click.argument("session", required=False)
@limit_option
@json_option
@answers
def list_(session: str | None, limit: int, as_json: bool) -> None:
    """List anchors, those of one session or the newest of all."""
    found = run_async(_find(session, limit))
    if as_json:
        say_json(found)
        return
    table = plain_table(
        "session", "position", "anchor", "status", "bytes", "tags", right=("position", "bytes")
    )
    for one in found:
        table.add_row(
            str(one["session_id"]),
            str(one["position"]),
            one["anchor_id"],
            one["status"] if one["code"] is None else f"{one['status']}: {one['code']}",
            str(one["size_bytes"] or ""),
            shortened(", ".join(one["tags"] or ())),
        )
    print_table(
        table,
        empty="No anchors: `anchors: {every_steps: 100}` in an agent's spec asks for some.",
    )


@anchors.command()
@click.argument("session")
@click.argument("anchor")
@json_option
@answers
def show(session: str, anchor: str, as_json: bool) -> None:
    """Show one anchor of a session.

    It is named by its position or by the head of its id.
    """
    found = [one for one in run_async(_find(session, ANCHORS_MAX)) if _is_named(one, anchor)]
    if len(found) != 1:
        how = "no anchor is" if not found else f"{len(found)} anchors are"
        raise Refused(f"{how} named {anchor} there: `dsec anchors list {session}` shows them")
    if as_json:
        say_json(found[0])
        return
    print_fields(found[0])


@anchors.command()
@click.argument("session", required=False)
@limit_option
@json_option
@answers
def check(session: str | None, limit: int, as_json: bool) -> None:
    """Hold the blobs of stored anchors against the hashes in the log.

    Nothing is unpickled: that happens in workers alone. Exits other than 0 if a blob is missing or
    damaged.
    """
    answer = run_async(_check(session, limit))
    if as_json:
        say_json(answer)
    else:
        for bad in answer["bad"]:
            out.print(f"{bad['session_id']} at {bad['position']}: {bad['problem']}", soft_wrap=True)
        out.print(
            f"{answer['checked']} stored anchors checked: {answer['missing']} missing, "
            f"{answer['damaged']} damaged. Besides {answer['lost']} are lost and "
            f"{answer['captured']} are on their way."
        )
    exit_with(answer["ok"])


def shortened(text: str) -> str:
    """For a table: an agent's tags may be a thousand characters, and push out all else."""
    return text if len(text) <= TAGS_SHOWN_CHARS else text[: TAGS_SHOWN_CHARS - 1] + "…"


def _is_named(one: dict[str, Any], named: str) -> bool:
    return str(one["position"]) == named or (
        len(named) >= 4 and str(one["anchor_id"]).startswith(named)
    )


async def _find(session: str | None, limit: int) -> list[dict[str, Any]]:
    async with Client(name="cli") as client:
        return await _rows(client, session, limit)


async def _rows(client: Client, session: str | None, limit: int) -> list[dict[str, Any]]:
    if session is None:
        rows = await client.queries.rows(_NEWEST, limit=limit)
    else:
        session_id: UUID = await find_session(client.queries, session)
        rows = await client.queries.rows(
            _OF_SESSION, session_id=session_id, session_at=session_time(session_id), limit=limit
        )
    return [dict(row._mapping) for row in rows]


async def _check(session: str | None, limit: int) -> dict[str, Any]:
    from dsec.platform.objects import BlobDamaged, BlobNotFound

    places = asyncio.Semaphore(READS_IN_FLIGHT_MAX)
    async with Client(name="cli") as client:
        rows = await _rows(client, session, limit)
        stored = [row for row in rows if row["status"] == "stored"]
        get = client.objects().get if stored else None
        bad: list[dict[str, Any]] = []

        async def read(row: dict[str, Any]) -> None:
            assert get is not None
            try:
                async with places:
                    await asyncio.to_thread(get, row["blob"])
            except (BlobNotFound, BlobDamaged) as error:
                problem = "damaged" if isinstance(error, BlobDamaged) else "missing"
                about = {name: row[name] for name in ("session_id", "position", "anchor_id")}
                bad.append({**about, "problem": problem, "message": str(error)})

        with progress() as display:
            task = display.add_task("anchors", total=len(stored))
            works = [asyncio.create_task(read(row)) for row in stored]
            try:
                for work in asyncio.as_completed(works):
                    await work
                    display.advance(task)
            finally:  # the store is away: the others say the same
                for one in works:
                    one.cancel()
                await asyncio.gather(*works, return_exceptions=True)
    bad.sort(key=lambda one: (str(one["session_id"]), one["position"]))
    return {
        "ok": not bad,
        "checked": len(stored),
        "missing": sum(one["problem"] == "missing" for one in bad),
        "damaged": sum(one["problem"] == "damaged" for one in bad),
        "lost": sum(row["status"] == "lost" for row in rows),
        "captured": sum(row["status"] == "captured" for row in rows),
        "bad": bad,
    }
