"""What was published and is not in the log: it could not be read, or not yet, or the log has
something else in its place."""

from __future__ import annotations

import asyncio

from dsec.platform.bus import Bus
from dsec.platform.bus.retry import LOOKING
from dsec.platform.storage import conflicts, parked_messages
from dsec_contracts import subjects


async def dead_letters(nats_url: str) -> dict[str, int]:
    """How many messages each consumer gave up, those that the stream still has.

    Raises:
        BusError: the server does not answer, or has no stream.
    """
    bus = await Bus.connect(nats_url, "status", LOOKING)
    try:
        found = await bus.counts(f"{subjects.DEAD_LETTER}.*")
    finally:
        await bus.close()
    start = len(f"{subjects.DEAD_LETTER}.")
    return {subject[start:]: count for subject, count in sorted(found.items())}


def put_aside(nats_url: str, database_url: str) -> dict[str, dict[str, int]]:
    """`dead_letters` by consumer, `parked` by event type, and `conflicts` by kind.

    Raises:
        BusError, DatabaseError: a server does not answer.
    """
    return {
        "dead_letters": asyncio.run(dead_letters(nats_url)),
        "parked": parked_messages(database_url),
        "conflicts": conflicts(database_url),
    }


def sentences(found: dict[str, dict[str, int]]) -> list[str]:
    """The same for people; empty where nothing was put aside."""
    told = []
    if dead := found["dead_letters"]:
        told.append(
            f"{_counted(dead)} could not be read and {_are(dead)} put aside: the logs of these "
            f"services say why, the subjects {subjects.DEAD_LETTER}.* have their bytes."
        )
    if parked := found["parked"]:
        told.append(
            f"{_counted(parked)} {_are(parked)} of a version that is not known here: the table "
            "event_parked keeps what an upgrade will read."
        )
    if other := found["conflicts"]:
        told.append(
            f"{_counted(other, 'output')} came a second time with another fact, which is no "
            "determinism: the first counts, the table event_aside has the other, and `dsec "
            "sessions show` names those of a session."
        )
    return told


def _counted(found: dict[str, int], what: str = "message") -> str:
    total = sum(found.values())
    each = ", ".join(f"{name} {count}" for name, count in found.items())
    return f"{total} {what if total == 1 else f'{what}s'} ({each})"


def _are(found: dict[str, int]) -> str:
    return "is" if sum(found.values()) == 1 else "are"
