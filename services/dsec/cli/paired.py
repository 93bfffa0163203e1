"""The statistics of `dsec compare`: the mean difference of pairs, with its confidence interval.

Pairs share a seed, so what the seed does to both drops out of their difference; that is why a
few pairs say what many unpaired sessions could not. The interval is that of the paired t test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, Cornish and
# Fisher's expansion is exact to the fifth digit.
_T95 = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157,
    2.228139, 2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922,
    2.093024, 2.085963, 2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831,
    2.048407, 2.045230, 2.042272,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of `b - a` over pairs; no interval from a single pair."""

    pairs: int
    mean_difference: float | None
    ci95: tuple[float, float] | None


def t95(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The mean of `b[i] - a[i]` and its 95 % confidence interval."""
    differences = [y - x for x, y in zip(a, b, strict=True)]
    n = len(differences)
    if n == 0:
        return Difference(0, None, None)
    mean = fmean(differences)
    if n == 1:
        return Difference(1, mean, None)
    half = t95(n - 1) * stdev(differences) / math.sqrt(n)
    return Difference(n, mean, (mean - half, mean + half))
