"""Derived seeds: frozen, separate, 63 bits."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.session import seeds
from dsec.session.seeds import PURPOSES, derive


def test_vector_is_frozen():
    assert derive(7, "env", 0) == 2650692407565412115


@given(st.integers(), st.text(), st.integers())
def test_sixty_three_bits(seed, purpose, index):
    assert 0 <= derive(seed, purpose, index) < 2**63


@given(st.lists(st.tuples(st.integers(), st.text(), st.integers()), unique=True, max_size=20))
def test_distinct_inputs_give_distinct_seeds(inputs):
    assert len({derive(*one) for one in inputs}) == len(inputs)


def test_a_purpose_cannot_imitate_another():
    assert derive(1, "a\n2", 3) != derive(1, "a", 2)
    assert derive(1, "1:a", 3) != derive(11, ":a", 3)


def test_purposes_are_separate():
    assert len({derive(7, purpose, i) for purpose in PURPOSES for i in range(100)}) == 1_000


def test_the_purposes_in_use_are_those_that_are_listed():
    package = Path(seeds.__file__).parents[1]
    used = [
        purpose
        for file in package.rglob("*.py")
        if file.name != "seeds.py"
        for purpose in re.findall(r"\bderive\([^\n]*?, f?\"(\w+)[\":]", file.read_text())
    ]
    # The environment's seed is told once more, with an exported episode.
    assert sorted(used) == sorted([*PURPOSES, "env"])


def test_numpy_integers_are_integers_and_floats_are_not():
    assert derive(np.int64(7), "env", np.uint8(0)) == derive(7, "env", 0)
    with pytest.raises(TypeError):
        derive(7.0, "env", 0)  # type: ignore[arg-type]
