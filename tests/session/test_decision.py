"""What is said of a decision that is none."""

from __future__ import annotations

from typing import Any

import pytest

from dsec.session.decision import checked
from dsec.session.stops import Stop


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (1, "step() must return a dict with `action`, not 1"),
        ({"act": 1}, "step() must return a dict with `action`, not one with 'act' alone"),
        ({}, "step() must return a dict with `action`, not an empty one"),
    ],
)
def test_what_step_returned_instead_of_a_decision_is_told(given: Any, told: str) -> None:
    with pytest.raises(Stop) as stopped:
        checked(given)
    assert str(stopped.value).endswith(told)
