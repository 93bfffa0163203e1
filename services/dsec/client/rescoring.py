"""Having the rewards of sessions that have ended computed anew, as a later revision.

One revision is one function's, over all sessions that were named together. Of several who ask at
the same time nobody gets in between the others unseen: each request expects to come right behind
the last one that its client knows of, whosever that was, and a client that is refused looks again
at what the log was asked for. So revisions that meet in a session are in one order in all of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from dsec.client.client import Client
from dsec.client.endpoints import ClientError
from dsec.client.publishing import SOURCE
from dsec.client.queries import AT, at_parameters
from dsec.client.waiting import POLL_S_MAX, POLL_S_MIN
from dsec.platform.bus import Bus, PublishRefused
from dsec.platform.clock import utc_now
from dsec_contracts import RewardRescoreRequested, keys, subjects
from dsec_contracts.reward import RescoreCircumstance, RescoreFact

SESSIONS_AT_ONCE_MAX = 500
REFUSALS_MAX = 10_000
"""Times that others come between, before it is given up."""
REFUSED_PAUSE_S_MAX = 0.1
LOGGED_WITHIN_S_MAX = 30.0
REQUESTS = subjects.every(RewardRescoreRequested.event_name())
_HIGHEST = f"""
select max(n) from (
    select split_part(key, '.', 2)::integer as n from event_log
    where {AT} and key >= 'reward:' and key < 'reward;'
    union all
    select split_part(key, ':', 2)::integer from event_log
    where {AT} and key >= 'rescore_requested:' and key < 'rescore_requested;'
) revisions
"""
_ASKED = f"""
select key from event_log
where {AT} and key = :key and fact_json->>'reward_fn_hash' = :hash
"""
_OUTCOMES = f"""
select session_id, fact_json->>'reward_fn_hash' as reward_fn_hash,
    (fact_json->>'scored')::integer as scored,
    (fact_json->>'unscored_total')::integer as unscored,
    coalesce(fact_json->>'code', '') as code,
    replace(circumstance::text, '\\u0000', '\\u2400')::json->>'message' as message
from event_log where {AT} and key = :key
"""


@dataclass(frozen=True, slots=True)
class Rescored:
    """What came of one session. `code` says why nothing was scored at all; empty: it was.
    `message` is that of the first step that got no reward."""

    session_id: UUID
    revision: int
    scored: int
    unscored: int
    code: str = ""
    message: str = ""


async def rescore(
    client: Client,
    ids: Sequence[UUID],
    reward_fn_hash: str,
    *,
    timeout_s: float | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[Rescored]:
    """Have the rewards of sessions that have ended computed anew. Runs neither agents nor
    environments. The new rewards are one revision, the same for all of these sessions.

    Args:
        reward_fn_hash: of a registered reward spec.
        on_progress: called with the number of sessions that are done.

    Raises:
        ClientError: others come between all the time.
        LogBehind: the recorder does not get on.
        TimeoutError: not done within `timeout_s`. The work goes on.
    """
    revision = await _ask(client, ids, reward_fn_hash)
    found: dict[UUID, Rescored] = {}
    async with asyncio.timeout(timeout_s):
        pause_s = POLL_S_MIN
        while len(found) < len(ids):
            before = len(found)
            for portion in _portions([one for one in ids if one not in found]):
                found |= await _outcomes(client, portion, revision, reward_fn_hash)
            if on_progress is not None:
                on_progress(len(found))
            pause_s = POLL_S_MIN if len(found) > before else min(POLL_S_MAX, pause_s * 1.5)
            if len(found) < len(ids):
                await asyncio.sleep(pause_s)
    return [found[session_id] for session_id in ids]


async def _ask(client: Client, ids: Sequence[UUID], reward_fn_hash: str) -> int:
    """Ask for a revision that is the same for all of these sessions, and nobody else's in any."""
    bus, log = await client.bus(), await client.log()
    revision = asked = 0
    for _ in range(REFUSALS_MAX):
        last = await bus.last_sequence(REQUESTS)
        await log.wait_floor(last, LOGGED_WITHIN_S_MAX)
        if revision and await _is_asked(client, ids[asked], revision, reward_fn_hash):
            asked += 1  # the acknowledgement was lost, and what was sent again came second
        if revision <= await _highest(client, ids[asked:]):
            # Somebody was before us there, so all of ours come after all of theirs.
            asked, revision = 0, await _highest(client, ids) + 1
        try:
            while asked < len(ids):
                last = await _publish(bus, ids[asked], revision, reward_fn_hash, client.name, last)
                asked += 1
        except PublishRefused:
            await asyncio.sleep(random.uniform(0, REFUSED_PAUSE_S_MAX))
        else:
            return revision
    raise ClientError("others have sessions scored anew all the time: ask again later")


async def _is_asked(client: Client, session_id: UUID, revision: int, reward_fn_hash: str) -> bool:
    """Whether the log has this very request."""
    given = {"key": keys.rescore_requested(revision), "hash": reward_fn_hash}
    return bool(await client.queries.rows(_ASKED, **given, **at_parameters([session_id])))


async def _highest(client: Client, ids: Sequence[UUID]) -> int:
    """The highest revision that any of these has, or was asked for."""
    highest = 1
    for portion in _portions(ids):
        [row] = await client.queries.rows(_HIGHEST, **at_parameters(portion))
        highest = max(highest, row[0] or 1)
    return highest


async def _outcomes(
    client: Client, ids: Sequence[UUID], revision: int, reward_fn_hash: str
) -> dict[UUID, Rescored]:
    rows = await client.queries.rows(_OUTCOMES, key=f"rescored:{revision}", **at_parameters(ids))
    found = {}
    for row in rows:
        if row.reward_fn_hash != reward_fn_hash:
            raise ClientError(
                f"revision {revision} of session {row.session_id} is another function's, which "
                "somebody asked for past this client: ask again, for the next revision"
            )
        found[row.session_id] = Rescored(
            row.session_id, revision, row.scored, row.unscored, row.code, row.message or ""
        )
    return found


async def _publish(
    bus: Bus, session_id: UUID, revision: int, reward_fn_hash: str, client: str, last: int
) -> int:
    fact = RescoreFact(session_id=session_id, revision=revision, reward_fn_hash=reward_fn_hash)
    return await bus.publish(
        RewardRescoreRequested(fact=fact, circumstance=RescoreCircumstance(client=client)),
        session_id,
        source=SOURCE,
        time=utc_now(),
        event_id=f"{session_id}.rescore_requested.{revision}.{reward_fn_hash[:16]}",
        session_id=session_id,
        expected_sequence=last,
        expected_of=REQUESTS,
    )


def _portions(ids: Sequence[UUID]) -> list[Sequence[UUID]]:
    size = SESSIONS_AT_ONCE_MAX
    return [ids[n : n + size] for n in range(0, len(ids), size)]
