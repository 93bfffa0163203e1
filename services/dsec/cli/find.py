"""Sessions as people name them: the whole id, or as much of its head as is unique."""

from __future__ import annotations

import contextlib
from uuid import UUID

from dsec.cli.answer import Refused
from dsec.client.queries import Queries

PREFIX_CHARS_MIN = 4


async def find_session(queries: Queries, named: str) -> UUID:
    """The id of a session that the log knows.

    Raises:
        Refused: none or several match.
    """
    if not set(named.lower()) <= set("0123456789abcdef-") or len(named) < PREFIX_CHARS_MIN:
        raise Refused(
            f"{named!r} is no session id: give at least {PREFIX_CHARS_MIN} of its first "
            "characters; `dsec sessions list` shows them"
        )
    with contextlib.suppress(ValueError):
        named = str(UUID(named))  # as the log writes it, whatever form was given
    found = await queries.matching(named)
    if not found:
        raise Refused(f"the log has no session {named}: `dsec sessions list` shows what it has")
    if len(found) > 1:
        raise Refused(f"{named} begins several session ids: give more of it")
    return found[0]
