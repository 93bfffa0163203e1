"""The list of guards is up to date: every text is where it says. `just mutants` takes them away."""

from __future__ import annotations

import pytest
from tests.mutants.run import ROOT, Guard, guards, without


@pytest.mark.parametrize("guard", guards(), ids=lambda guard: guard.promise)
def test_a_guard_is_where_the_list_says(guard: Guard) -> None:
    source = (ROOT / guard.file).read_text()
    assert without(guard, source) != source
    assert (ROOT / guard.test.split("::")[0].split()[0]).exists()
