"""What was published and cannot be read is told by `dsec status`, and not by a log file alone."""

from __future__ import annotations

import pytest

from dsec.cli.put_aside import dead_letters, sentences
from dsec.platform.bus import Bus


@pytest.mark.nats
async def test_dead_letters_are_counted_by_who_gave_them_up(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, "test")
    await bus.ensure_stream()
    before = await dead_letters(nats_url)
    for consumer in ("aside-a", "aside-b", "aside-b"):
        await bus.publish_raw(f"dsec.dead.{consumer}", b"{", {})
    after = await dead_letters(nats_url)
    assert after == {**before, "aside-a": 1, "aside-b": 2}
    for consumer in ("aside-a", "aside-b"):
        await bus.purge(f"dsec.dead.{consumer}", await bus.last_sequence("dsec.dead.*") + 1)
    await bus.close()


def test_what_was_put_aside_is_said() -> None:
    assert sentences({"dead_letters": {}, "parked": {}, "conflicts": {}}) == []
    dead, parked, conflicts = sentences(
        {
            "dead_letters": {"recorder": 3, "tool": 1},
            "parked": {"session.requested.v99": 1},
            "conflicts": {"session.stepped": 2},
        }
    )
    assert dead.startswith("4 messages (recorder 3, tool 1) could not be read and are put aside")
    assert parked.startswith("1 message (session.requested.v99 1) is of a version")
    assert conflicts.startswith("2 outputs (session.stepped 2) came a second time with another")
