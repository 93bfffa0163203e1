"""Sessions as people name them: the whole id, or as much of its head or its tail as is unique.

The ids of sessions that were requested together begin alike, since they begin with the time.
"""

from __future__ import annotations

import contextlib
from uuid import UUID

from tenacity import AsyncRetrying, RetryError, retry_if_result, stop_after_delay, wait_fixed

from dsec.cli.answer import Refused
from dsec.client.queries import Queries
from dsec_contracts.keys import check_session_id

PART_CHARS_MIN = 4
LISTED_MAX = 5
LOG_LAG_S_MAX = 3.0
LOG_POLL_S = 0.2


def whole_id(named: str) -> UUID | None:
    """The session id that is written out, or None where it is only the head of one."""
    try:
        return check_session_id(UUID(named))
    except ValueError:
        return None


async def find_session(queries: Queries, named: str) -> UUID:
    """The id of a session that the log knows.

    Raises:
        Refused: none or several match.
    """
    if not set(named.lower()) <= set("0123456789abcdef-") or len(named) < PART_CHARS_MIN:
        raise Refused(
            f"{named!r} is no session id: give at least {PART_CHARS_MIN} of its first or last "
            "characters; `dsec sessions list` shows them"
        )
    found, how = await queries.beginning(named, LISTED_MAX + 1), "begin"
    whole = whole_id(named) is not None
    if not found and not whole:
        found, how = await queries.ending(named, LISTED_MAX + 1), "end"
    if not found and whole:
        # Just requested, perhaps: the log is moments behind the stream.
        with contextlib.suppress(RetryError):
            found = await AsyncRetrying(
                stop=stop_after_delay(LOG_LAG_S_MAX),
                wait=wait_fixed(LOG_POLL_S),
                retry=retry_if_result(lambda ids: not ids),
            )(queries.beginning, named, 1)
    if not found:
        aside = "; a request that could not be read is put aside: `dsec status`" if whole else ""
        raise Refused(
            f"the log has no session {named}: `dsec sessions list` shows what it has{aside}"
        )
    if len(found) > 1:
        listed = "".join(f"\n  {session_id}" for session_id in found[:LISTED_MAX])
        more = "\n  …" if len(found) > LISTED_MAX else ""
        raise Refused(
            f"{named} is ambiguous, several session ids {how} with it: give more of it, or the "
            f"last characters of the one you mean{listed}{more}"
        )
    return found[0]
