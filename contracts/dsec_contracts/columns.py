"""Columns: parallel arrays over the rows of one hot message.

Fixed-width columns are little-endian bytes, n times the width; variable ones are `n + 1` int32
offsets and the bytes between them, the layout of an Arrow binary array. Both travel as base64 in
the JSON body, so a reader gets from the wire to numpy or Arrow without a loop over rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Self

from pydantic import model_validator

from dsec_contracts.envelope import Part

ROWS_PER_MESSAGE_MAX = 65_536
BASE64_GROWTH = 1.35
"""By how much a column's bytes grow in the JSON body, with what surrounds them."""
PAYLOAD_SHARE_MAX = 0.9
"""How much of what the server takes rows may fill: the headers and what is estimated need the rest.
"""
COLUMN_BYTES_MAX = 2**31 - 1
"""What an int32 offset can reach."""


class VarColumn(Part):
    """Bytes of varying length, one entry a row. An empty entry stands for "none"."""

    offsets: bytes
    """int32 little-endian, n + 1 of them, from 0, never falling."""
    data: bytes

    @classmethod
    def pack(cls, rows: Sequence[bytes]) -> VarColumn:
        """Pack `rows` into one column.

        Raises:
            ValueError: they have more than `COLUMN_BYTES_MAX` bytes together.
        """
        if not any(rows):  # most columns of a tick are empty
            return cls.model_construct(offsets=bytes(4 * (len(rows) + 1)), data=b"")
        ends = list(accumulate(map(len, rows), initial=0))
        if ends[-1] > COLUMN_BYTES_MAX:
            raise ValueError(f"a column of {ends[-1]} bytes; the limit is {COLUMN_BYTES_MAX}")
        return VarColumn.model_construct(
            offsets=struct.pack(f"<{len(ends)}i", *ends), data=b"".join(rows)
        )

    def ends(self) -> tuple[int, ...]:
        """The offsets as integers."""
        return struct.unpack(f"<{len(self.offsets) // 4}i", self.offsets)

    def unpack(self) -> list[bytes]:
        """The rows."""
        ends, data = self.ends(), self.data
        return [data[a:b] for a, b in pairwise(ends)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.offsets) < 4 or len(self.offsets) % 4:
            raise ValueError("offsets must be n + 1 int32 values")
        ends = self.ends()
        if ends[0] != 0 or ends[-1] != len(self.data) or list(ends) != sorted(ends):
            raise ValueError("offsets must rise from 0 to the length of data")
        return self

    def __len__(self) -> int:
        return len(self.offsets) // 4 - 1


def fixed_rows(column: bytes, width_bytes: int) -> list[bytes]:
    """The rows of a fixed-width column, as bytes."""
    return [column[n : n + width_bytes] for n in range(0, len(column), width_bytes)]


def check_columns(
    rows: int, fixed: dict[str, tuple[bytes, int]], var: dict[str, VarColumn]
) -> None:
    """Check that every column of a message has `rows` entries.

    Args:
        fixed: column name to (bytes, width in bytes).
        var: column name to variable column.

    Raises:
        ValueError: names the first column whose length is wrong.
    """
    if not 0 <= rows <= ROWS_PER_MESSAGE_MAX:
        raise ValueError(f"rows is {rows}, outside 0 to {ROWS_PER_MESSAGE_MAX}")
    for name, (data, width_bytes) in fixed.items():
        if len(data) != rows * width_bytes:
            raise ValueError(f"{name} has {len(data)} bytes, not {rows} x {width_bytes}")
    for name, column in var.items():
        if len(column) != rows:
            raise ValueError(f"{name} has {len(column)} rows, not {rows}")


def check_flags(**columns: bytes) -> None:
    """Check that uint8 columns of flags hold 0 and 1 only.

    Raises:
        ValueError: names the first column that does not.
    """
    for name, data in columns.items():
        # Stripping stops at the first other byte from either end, so something is left.
        if data.strip(b"\0\1"):
            raise ValueError(f"{name} has a byte that is neither 0 nor 1")
