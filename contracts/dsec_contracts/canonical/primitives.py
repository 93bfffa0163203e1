"""What every reader of canonical bytes is made of: heads, byte strings and texts, at a position.

All take the bytes and a position and return what they read and the position behind it. Bytes that
end too early are an `IndexError`, which `decode` turns into its own error.
"""

from __future__ import annotations

from typing import Any

from dsec_contracts.canonical.form import CanonicalError

Read = tuple[Any, int]
"""A value and the position behind it."""


def argument(data: bytes, at: int, low: int) -> tuple[int, int]:
    """The argument of an item's head, and where it ends."""
    if low < 24:
        return low, at
    if low > 27:
        raise CanonicalError(f"indefinite or reserved length at byte {at - 1}")
    size = 1 << (low - 24)
    if at + size > len(data):
        raise IndexError
    n = int.from_bytes(data[at : at + size], "big")
    if n < (24 if size == 1 else 1 << (4 * size)):
        raise CanonicalError(f"a number at byte {at - 1} is not in its shortest form")
    return n, at + size


def take(data: bytes, at: int, n: int) -> tuple[bytes, int]:
    """The next `n` bytes."""
    if n > len(data) - at:
        raise IndexError
    return data[at : at + n], at + n


def utf8(data: bytes, at: int, n: int) -> tuple[str, int]:
    """The next `n` bytes as text."""
    raw, end = take(data, at, n)
    try:
        return raw.decode(), end
    except UnicodeDecodeError as error:
        raise CanonicalError(f"text at byte {at} is not UTF-8: {error.reason}") from None


def expect(data: bytes, at: int, major: int, what: str) -> tuple[int, int]:
    """The argument of an item that must be of one major type."""
    first = data[at]
    if first >> 5 != major:
        raise CanonicalError(f"byte {at} should begin {what}")
    return argument(data, at + 1, first & 31)


def read_text(data: bytes, at: int, what: str) -> tuple[str, int]:
    """A text that must come next."""
    n, at = expect(data, at, 3, what)
    return utf8(data, at, n)


def read_bytes(data: bytes, at: int, what: str) -> tuple[bytes, int]:
    """A byte string that must come next."""
    n, at = expect(data, at, 2, what)
    return take(data, at, n)


def check_parts(name: str, n: int, expected: int, at: int) -> None:
    """Refuse an object with another number of parts behind its name."""
    if n != expected:
        raise CanonicalError(f"object {name} before byte {at} has {n} parts, not {expected}")
