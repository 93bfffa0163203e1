"""Keeps passwords out of what is shown: URLs go without, and texts of others are cleaned."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, unquote, urlsplit

HIDDEN = "***"
_USER_PART = re.compile(r"(?<=://)[^/?#\s]*@")
_SECRET_KEYS = re.compile(r"pass|secret|token|key", re.IGNORECASE)


def shown(url: str) -> str:
    """A URL as it may be shown: without user, password, query and fragment."""
    return ",".join(_shown(part) for part in url.split(","))


def _shown(url: str) -> str:
    head, separator, rest = url.rpartition("://")
    place = re.split(r"[?#]", rest.rpartition("@")[2], maxsplit=1)[0]
    return head.rpartition("@")[2] + separator + place


class Hidden:
    """The secrets of some URLs, to be taken out of texts that are not ours."""

    def __init__(self, urls: Iterable[str]) -> None:
        found = {secret for url in urls for part in url.split(",") for secret in _secrets(part)}
        # The longest first, or one that is part of another would leave the rest of that one.
        self._secrets = sorted(found - {""}, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """`text` with nothing in it that a URL keeps secret."""
        text = _USER_PART.sub(f"{HIDDEN}@", text)
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


def _secrets(url: str) -> set[str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        return {url}
    user, colon, password = parts.netloc.rpartition("@")[0].partition(":")
    found = {password if colon else user}  # a bare user of NATS is a token
    found |= {value for key, value in parse_qsl(parts.query) if _SECRET_KEYS.search(key)}
    return found | {unquote(secret) for secret in found}
