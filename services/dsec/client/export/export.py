"""The export itself: reads sessions in portions, gives each episode to a writer, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from dsec.client.client import Client
from dsec.client.endpoints import ClientError
from dsec.client.episodes import Episode
from dsec.client.export import record
from dsec.client.export.destination import Destination
from dsec.platform.log import Position

SESSIONS_A_PORTION = 100
FORMATS = ("parquet", "minari", "jsonl")


class Writer(Protocol):
    """What a format is: takes episodes one by one, keeps none in memory, finishes once."""

    def add(self, episode: Episode) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Totals:
    """What was exported. `statuses` counts sessions by how they ended."""

    sessions: int = 0
    episodes: int = 0
    steps: int = 0
    reward_total: float = 0.0
    rewards_missing: int = 0
    without_steps: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    def count(self, episode: Episode) -> None:
        """One more episode."""
        self.episodes += 1
        self.steps += len(episode.rewards)
        self.without_steps += not len(episode.rewards)
        self.reward_total += float(episode.rewards[episode.mask].sum())
        self.rewards_missing += record.missing_rewards(episode)


async def finished_and_not(
    client: Client, ids: Sequence[UUID], as_of: Position | None = None
) -> tuple[list[UUID], list[UUID]]:
    """Which sessions are over and which are not, now or at a position, in their order."""
    over: set[UUID] = set()
    for portion in _portions(ids):
        over |= await client.queries.ended(portion, as_of)
        rest = [i for i in portion if i not in over]
        over |= (await client.queries.rejections(rest, as_of)).keys()
    return [i for i in ids if i in over], [i for i in ids if i not in over]


async def export(
    client: Client,
    ids: Sequence[UUID],
    format_: str,
    destination: Destination,
    as_of: Position,
    on_progress: Callable[[int], None] | None = None,
) -> Totals:
    """Write the episodes of sessions as the log has them at a position.

    Args:
        as_of: the same sessions at the same position give the same episodes, always.
        on_progress: called with the number of sessions that were read.

    Raises:
        ClientError: the format cannot hold them, or the place was taken meanwhile.
    """
    totals = Totals()
    documents: dict[str, dict[str, Any]] = {}
    with destination:
        writer = make_writer(format_, destination.draft, documents)
        try:
            for portion in _portions(ids):
                statuses: dict[UUID, str] = {}
                async for episode in client.episodes(portion, as_of=as_of):
                    if format_ == "minari":
                        await _learn_env(client, episode.specs.get("env", ""), documents)
                    writer.add(episode)
                    totals.count(episode)
                    statuses[episode.session_id] = episode.status
                totals.sessions += len(portion)
                # One that ends at the border of an episode, or without a step, gives none of its
                # own and has completed.
                totals.statuses.update(statuses.get(i, "completed") for i in portion)
                if on_progress is not None:
                    on_progress(totals.sessions)
            writer.finish()
        finally:
            writer.close()
        totals.bytes = destination.commit()
    return totals


def make_writer(format_: str, path: Path, documents: Mapping[str, dict[str, Any]]) -> Writer:
    """The writer of a format.

    Raises:
        ClientError: there is none, or what it needs is not installed.
    """
    if format_ == "jsonl":
        from dsec.client.export.jsonl import JsonlWriter

        return JsonlWriter(path)
    if format_ == "parquet":
        from dsec.client.export.parquet import ParquetWriter

        return ParquetWriter(path)
    if format_ == "minari":
        from dsec.client.export.minari import MinariWriter

        return MinariWriter(path, documents.get)
    raise ClientError(f"there is no format {format_}: take one of {', '.join(FORMATS)}")


async def _learn_env(client: Client, spec_hash: str, known: dict[str, dict[str, Any]]) -> None:
    """Put the document of an environment's spec into `known`, where the log itself has it."""
    if not spec_hash or spec_hash in known:
        return
    content = await (await client.log()).spec(spec_hash)
    known[spec_hash] = content.value()["document"] if content and content.content else {}


def _portions(ids: Sequence[UUID]) -> list[Sequence[UUID]]:
    return [ids[n : n + SESSIONS_A_PORTION] for n in range(0, len(ids), SESSIONS_A_PORTION)]
