"""Upcasters: stored bytes are never edited, so an old version is made new on its way in.

An upcaster takes the JSON body of one version and returns that of the next; chains run until the
newest known version. There is none yet: every event is at version 1.
"""

from __future__ import annotations

from collections.abc import Callable

UPCASTERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {}
"""Type to (next type, function from body to body)."""


def upcast(event_type: str, body: bytes) -> tuple[str, bytes]:
    """The newest type and body that this version can make of a message."""
    while (rule := UPCASTERS.get(event_type)) is not None:
        event_type, body = rule[0], rule[1](body)
    return event_type, body
