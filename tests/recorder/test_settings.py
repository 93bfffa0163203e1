"""How long a commit waits for more rows."""

from __future__ import annotations

import pytest

from dsec.recorder.settings import RecorderSettings


@pytest.mark.parametrize(
    ("commit_s", "pause_s"), [(0.0, 0.05), (0.004, 0.05), (0.01, 0.09), (0.02, 0.18), (3.0, 0.25)]
)
def test_dear_commits_come_less_often_within_bounds(commit_s: float, pause_s: float) -> None:
    settings = RecorderSettings(commit_share=0.1)
    assert settings.pause_s(commit_s) == pytest.approx(pause_s)


def test_a_period_of_nothing_is_nothing_where_the_longest_is_too() -> None:
    settings = RecorderSettings(commit_period_ms=0, commit_period_ms_max=0)
    assert settings.pause_s(1.0) == 0
