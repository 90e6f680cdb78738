"""Intervals for what a run claims: 95 %, and honest about what was repeated.

Several samples of one task are not independent, so a pass rate's interval runs
over tasks (each task's mean is one observation), not over samples. Pure
functions; no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % bounds, from ``n`` observations."""

    mean: float
    low: float
    high: float
    n: int


def student_t95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t: Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).

    Exact values are used up to four degrees, where the expansion is poor.
    """
    exact = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}
    if degrees in exact:
        return exact[degrees]
    z, v = Z95, float(degrees)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / v + g2 / v**2 + g3 / v**3


def mean_interval(samples_by_task: Sequence[Sequence[float]], low: float, high: float) -> Interval:
    """Mean over tasks of each task's mean, with a t interval over tasks, cut at [low, high].

    Where no task's mean differs from another's, t would claim certainty: Wilson's interval
    over the tasks is taken instead. Raises ValueError without any sample.
    """
    means = [sum(samples) / len(samples) for samples in samples_by_task if samples]
    if not means:
        raise ValueError("no sample to average")
    n = len(means)
    mean = sum(means) / n
    deviation = math.sqrt(sum((m - mean) ** 2 for m in means) / max(1, n - 1))
    if deviation < 1e-12:
        share = min(1.0, max(0.0, (mean - low) / (high - low)))
        wilson = wilson_interval(share * n, n)
        return Interval(mean, low + wilson.low * (high - low), low + wilson.high * (high - low), n)
    half = student_t95(n - 1) * deviation / math.sqrt(n)
    return Interval(mean, max(low, mean - half), min(high, mean + half), n)


def wilson_interval(successes: float, n: int) -> Interval:
    """Wilson's score interval for a proportion (Wilson 1927), which keeps its coverage near 0 and 1."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"not a proportion: {successes} of {n}")
    p = successes / n
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n**2))
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), n)
