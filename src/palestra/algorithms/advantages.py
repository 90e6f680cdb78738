"""Rewards of one group in, one advantage per member out.

A group is compared only with itself: its advantages sum to zero, whatever its
size, and no member's advantage depends on another group. Groups may be ragged
and may be singletons. A group that says nothing (one member, or all rewards
equal but for rounding) has advantages of exactly 0, never rounding noise divided
by epsilon, so "zero advantage" can be tested with ``== 0``. Pure Python: no
framework, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDING = 1e-12
"""Rewards this close, relative to the largest (or to 1), are equal: a float keeps 16 digits."""


def group_advantages(
    rewards: Sequence[float], *, normalize_std: bool = True, epsilon: float = 1e-6
) -> list[float]:
    """How much better each member did than its group's mean.

    GRPO (DeepSeekMath, arXiv:2402.03300): ``(r - mean) / (std + epsilon)`` with the
    sample standard deviation (Bessel's n - 1). ``normalize_std=False`` is Dr. GRPO
    (arXiv:2503.20783): ``r - mean``. One member, or rewards that differ by rounding
    only: exactly 0.

    Raises ValueError for a reward that is not finite or a negative epsilon.
    """
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be finite and >= 0, got {epsilon}")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{index}] is not finite: {reward}")
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    least, most = min(rewards), max(rewards)
    if most - least <= ROUNDING * max(1.0, abs(least), abs(most)):
        return [0.0] * count
    mean = math.fsum(reward / count for reward in rewards)
    deviations = [reward - mean for reward in rewards]
    if not normalize_std:
        return deviations
    # hypot does not overflow or underflow where a sum of squares would.
    std = math.hypot(*deviations) / math.sqrt(count - 1)
    return [deviation / (std + epsilon) for deviation in deviations]
