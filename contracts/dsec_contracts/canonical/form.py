"""What both directions of the canonical encoding share: heads, limits, names of dtypes and tuples.

A rule that only one direction knew would let `encode` write what `decode` refuses, so every rule
about which values have a form is here.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from keyword import iskeyword
from typing import Any

NESTING_DEPTH_MAX = 64
"""Containers inside containers; a deeper (or self-referring) value is refused. Arrays, scalars and
bignums are no containers."""

NAN = b"\xfb\x7f\xf8\x00\x00\x00\x00\x00\x00"
TAG_OBJECT = b"\xd8\x1b"

# longdouble is left out: its width and its padding, which is uninitialised, differ by machine. A
# width of text has 7 digits at most, since an empty array takes the memory of one item. A unit of
# time is never counted 0 times: numpy divides by that number, and the process is dead.
_DTYPE_NAME = re.compile(
    r"\|b1|\|[iu]1|<[iu][248]|<f[248]|<c(?:8|16)|\|S[0-9]{1,7}|<U[0-9]{1,7}"
    r"|<[mM]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)


class CanonicalError(ValueError):
    """A value has no canonical bytes, or bytes are not canonical. Says where in the value."""


@lru_cache(maxsize=65_536)
def head(major: int, n: int) -> bytes:
    """The first bytes of a CBOR item: major type 0 to 7 and its argument in the shortest form."""
    base = major << 5
    if n < 24:
        return bytes((base | n,))
    if n < 0x100:
        return bytes((base | 24, n))
    if n < 0x10000:
        return struct.pack(">BH", base | 25, n)
    if n < 0x1_0000_0000:
        return struct.pack(">BI", base | 26, n)
    return struct.pack(">BQ", base | 27, n)


def is_dtype_name(name: str) -> bool:
    """Whether `name` is written like a dtype that has a canonical form."""
    # numpy's own parser is not asked first: it also evaluates lists, shapes and old spellings.
    return _DTYPE_NAME.fullmatch(name) is not None


@lru_cache(maxsize=1024)
def dtype_name(dtype: Any) -> str:
    """The canonical name of a numpy dtype: little-endian, numpy's own spelling.

    Raises:
        CanonicalError: objects, records, longdouble and whatever else has no form.
    """
    # Kinds first: dtypes of a newer make (text of any length) have no byte order to ask for.
    name = str(dtype.newbyteorder("<").str) if dtype.kind in "biufcSUMm" else ""
    if not is_dtype_name(name):
        raise CanonicalError(f"a numpy dtype {str(dtype)[:100]} has no canonical form")
    return name


def check_named(name: str, fields: tuple[Any, ...]) -> None:
    """Refuse the name or a field of a named tuple that Python itself would refuse.

    Raises:
        CanonicalError: names what is wrong.
    """
    if not name.isidentifier() or iskeyword(name):
        raise CanonicalError(f"{name[:100]!r} cannot be the name of a named tuple")
    for n, field in enumerate(fields):
        # `_0`, `_1`, ... are what namedtuple(rename=True) makes, each at its own place only.
        if type(field) is not str or not (
            (field.isidentifier() and not iskeyword(field) and field[0] != "_") or field == f"_{n}"
        ):
            raise CanonicalError(f"field {n} of named tuple {name[:100]} is no field name")
    if len(set(fields)) != len(fields):
        raise CanonicalError(f"named tuple {name[:100]} has two fields of one name")
