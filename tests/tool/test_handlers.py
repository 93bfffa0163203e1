"""When a tool call may have been made before."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dsec.platform.bus.stream import DUPLICATE_WINDOW_S
from dsec.tool.asked import may_be_made

NOW = datetime(2026, 5, 4, tzinfo=UTC)


@pytest.mark.parametrize(
    ("late_s", "delivered", "age_s", "again", "expected"),
    [
        (0.01, 1, 0.1, False, False),
        (0.01, 2, 0.1, False, True),
        (0.01, 1, 0.1, True, True),
        (0.01, 1, 3.0, False, True),
        (0.01, 1, -3.0, False, True),
        (DUPLICATE_WINDOW_S + 1, 1, 0.1, False, True),
        (-5.0, 1, 0.1, False, False),
    ],
)
def test_a_copy_that_the_server_did_not_know_for_one_may_have_been_made(
    late_s: float, delivered: int, age_s: float, again: bool, expected: bool
) -> None:
    stored = NOW + timedelta(seconds=late_s)
    assert may_be_made(stored, NOW, delivered, age_s, 2.5, again=again) is expected
