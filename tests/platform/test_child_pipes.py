"""Frames: as large as their bound and no larger, whoever wrote them."""

from __future__ import annotations

import asyncio

import pytest

from dsec.platform.child_pipes import LENGTH, frame, received_body


def stream(data: bytes) -> asyncio.StreamReader:
    """A pipe that these bytes came through, and then its end."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def test_a_frame_up_to_its_bound_goes_through_and_a_larger_one_is_not_made() -> None:
    assert await received_body(stream(frame(b"four", 4) + b"next"), 4) == b"four"
    with pytest.raises(ValueError, match="5 bytes; the limit is 4"):
        frame(b"fives", 4)


async def test_a_frame_that_says_it_is_larger_is_not_waited_for() -> None:
    with pytest.raises(ValueError, match="5 bytes; the limit is 4"):
        await received_body(stream(LENGTH.pack(5) + b"fives"), 4)


async def test_a_frame_that_breaks_off_is_no_body() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        await received_body(stream(frame(b"four", 4)[:-1]), 4)
