"""What every HTTP request to somebody else's server has in common, whichever service sends it."""

from __future__ import annotations

import contextlib
import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import aiohttp

HEADER_BYTES_MAX: Final = 1 << 15
"""Of one header of an answer. More is a broken answer."""


def open_session(*, kept: bool = True, proxies: bool = False) -> aiohttp.ClientSession:
    """Connections without cookies, time-outs or a limit: whoever asks has those.

    Args:
        kept: for later requests. What is not is closed after its answer, so that nothing is sent
            twice by the client, which does that where a kept connection turns out to be closed.
        proxies: go through those that the environment names.
    """
    keeping: dict[str, Any] = {} if kept else {"force_close": True}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **keeping),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=proxies,
        max_line_size=HEADER_BYTES_MAX,
        max_field_size=HEADER_BYTES_MAX,
    )


def retry_after_s(header: str | None, now: datetime) -> float | None:
    """How long a server asks to be left alone: it says seconds, or a date. None: it does not."""
    if not header:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(header)
        return seconds if math.isfinite(seconds) and seconds >= 0 else None
    try:
        until = parsedate_to_datetime(header)
    except (ValueError, OverflowError):  # a year that no date has
        return None
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - now).total_seconds())
