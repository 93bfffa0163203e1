"""A receiver for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.otlp import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An OTLP receiver that takes everything."""
    made = Receiver()
    yield made
    made.close()
