"""What of an observation is recorded: its bytes, a reference to a blob, or nothing."""

from __future__ import annotations

from collections.abc import Callable

from dsec_contracts.canonical import decode, encode

_BLOB = "$blob"


def reference(key: str, size_bytes: int) -> bytes:
    """What stands in a row for an observation that lies in the object store."""
    return encode({_BLOB: key, "bytes": size_bytes})


def resolve(recorded: bytes, get: Callable[[str], bytes]) -> bytes:
    """The canonical observation behind a recorded one. Empty stays empty: none was recorded."""
    if recorded.startswith(b"\xa2") and b"\x65$blob" in recorded[:96]:
        value = decode(recorded)
        if set(value) == {_BLOB, "bytes"}:
            return get(value[_BLOB])
    return recorded
