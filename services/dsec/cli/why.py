"""`dsec why KEY`: from one event back along its causes, to the request that began it all."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import click
from rich.tree import Tree

from dsec.cli.answer import Refused, answers, json_option, out, run_async, say_json
from dsec.cli.find import find_session
from dsec.client.client import Client
from dsec_contracts import keys
from dsec_contracts.keys import session_time

CAUSES_MAX = 1_000_000
TAIL_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Node:
    """One event of the chain. `kind` is empty where the log does not have it (yet)."""

    event: str
    kind: str


@click.command()
@click.argument("key")
@click.option("--depth", type=click.IntRange(1), default=8, show_default=True, help="Causes shown.")
@json_option
@answers
def why(key: str, depth: int, as_json: bool) -> None:
    """Walk the causes of one event, named `SESSION/KEY` (such as 0197…/step:7 or …/reward:3.1).

    A session id alone asks why it ended.
    """
    nodes = run_async(_why(key))
    if as_json:
        causes = [{"event": node.event, "kind": node.kind} for node in nodes[1:]]
        say_json({"event": nodes[0].event, "kind": nodes[0].kind, "causes": causes})
        return
    _print(nodes, depth)


async def _why(named: str) -> list[Node]:
    async with Client(name="cli") as client:
        prefix, slash, key = named.partition("/")
        session_id = await find_session(client.queries, prefix)
        row = await (await client.log()).row(session_id, key if slash else keys.ENDED)
        if row is None and not slash:
            raise Refused(f"session {session_id} has not ended: name an event, as {prefix}/step:0")
        if row is None:
            raise Refused(
                f"session {session_id} has no event {key}: `dsec sessions events {prefix}` lists "
                "the keys"
            )
        return await _walk(client, Node(keys.of(session_id, row.key), row.kind))


async def _walk(client: Client, node: Node) -> list[Node]:
    """Along the causes. A session's edges are read once, since most causes lie in it."""
    edges: dict[str, tuple[str, str]] = {}
    read: set[UUID] = set()
    nodes, seen = [node], {node.event}
    while len(nodes) <= CAUSES_MAX:
        session_id = UUID(nodes[-1].event.partition("/")[0])
        if session_id not in read:
            read.add(session_id)
            edges |= await _edges(client, session_id)
        edge = edges.get(nodes[-1].event)
        if edge is None or edge[0] in seen:
            break
        seen.add(edge[0])
        nodes.append(Node(edge[0], ""))
    log = await client.log()
    result = []
    for node in nodes:
        kind = node.kind or edges.get(node.event, ("", ""))[1]
        if not kind:
            session, _, key = node.event.partition("/")
            row = await log.row(UUID(session), key)
            kind = row.kind if row is not None else ""
        result.append(Node(node.event, kind))
    return result


async def _edges(client: Client, session_id: UUID) -> dict[str, tuple[str, str]]:
    rows = await client.queries.rows(
        "select effect, cause, kind from causal_edge "
        "where session_id = :session_id and session_at = :at",
        session_id=session_id,
        at=session_time(session_id),
    )
    return {row.effect: (row.cause, row.kind) for row in rows}


def _print(nodes: list[Node], depth: int) -> None:
    """As a tree: each event hangs below what it caused."""
    shown = nodes
    left_out = len(nodes) - depth - TAIL_SHOWN
    if left_out > 1:
        shown = [*nodes[:depth], Node(f"… {left_out} more …", ""), *nodes[-TAIL_SHOWN:]]
    branch = tree = Tree(_line(shown[0], ""))
    session = nodes[0].event.partition("/")[0]
    for node in shown[1:]:
        branch = branch.add(_line(node, session))
    out.print(tree, soft_wrap=True)


def _line(node: Node, session: str) -> str:
    """The key alone where the session is the one that was asked about."""
    event = node.event.removeprefix(f"{session}/") if session else node.event
    return f"{event}  [dim]{node.kind}[/dim]" if node.kind else event
