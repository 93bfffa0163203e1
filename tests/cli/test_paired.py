"""The statistics of pairs, against values from tables and a case worked by hand."""

from __future__ import annotations

import pytest

from dsec.cli.paired import paired_difference, t95


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (9, 2.26216), (30, 2.04227), (31, 2.03951), (60, 2.00030), (1000, 1.96234)],
)
def test_quantiles(degrees: int, quantile: float) -> None:
    assert t95(degrees) == pytest.approx(quantile, abs=2e-5)


def test_a_case_by_hand() -> None:
    found = paired_difference([1, 2, 3, 4], [2, 4, 4, 6])
    # Differences 1, 2, 1, 2: mean 1.5, standard error 0.57735 / 2, quantile 3.182446.
    assert found.mean_difference == 1.5
    assert found.ci95 == pytest.approx((1.5 - 0.918694, 1.5 + 0.918694), abs=1e-5)


def test_few_pairs() -> None:
    assert paired_difference([], []).mean_difference is None
    one = paired_difference([1.0], [3.0])
    assert (one.pairs, one.mean_difference, one.ci95) == (1, 2.0, None)
    assert paired_difference([1.0, 1.0], [3.0, 3.0]).ci95 == (2.0, 2.0)
