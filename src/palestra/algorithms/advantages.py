"""Rewards in, advantages out: how much better each sample did than what it is compared with.

Functions over one group compare it only with itself: no member's advantage depends
on another group. Groups may be ragged and may be singletons. A group that says
nothing (one member, or all rewards equal but for rounding) has advantages of
exactly 0, never rounding noise divided by epsilon, so "zero advantage" can be
tested with ``== 0``; the same holds for a batch. Pure Python: no framework, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

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
    _check(rewards, epsilon)
    if _equal(rewards):
        return [0.0] * len(rewards)
    deviations = _deviations(rewards)
    if not normalize_std:
        return deviations
    scale = _std(deviations) + epsilon
    return [deviation / scale for deviation in deviations]


def rloo_advantages(rewards: Sequence[float]) -> list[float]:
    """REINFORCE leave-one-out (arXiv:2402.14740): ``r`` less the mean of the others."""
    count = len(rewards)  # r - (sum - r) / (n - 1) = n / (n - 1) (r - mean)
    return [d * count / (count - 1) if d else 0.0 for d in group_advantages(rewards, normalize_std=False)]


def maxrl_advantages(rewards: Sequence[float]) -> list[float]:
    """MaxRL (arXiv:2602.02710): ``(r - mean) / mean``.

    With rewards of 0 and 1 its expectation is the gradient of the likelihood of
    success, cut off after n - 1 of its orders. Raises ValueError for a negative reward.
    """
    deviations = group_advantages(rewards, normalize_std=False)
    if any(reward < 0 for reward in rewards):
        raise ValueError(f"maxrl divides by the mean reward, so no reward may be negative: {min(rewards)}")
    mean = math.fsum(rewards) / max(1, len(rewards))
    return [d / mean if d else 0.0 for d in deviations]


def pass_at_k_advantages(rewards: Sequence[float], k: int) -> list[float]:
    """PKPO (arXiv:2505.15201): the gradient of the best reward among k samples, unbiased.

    ``n / C(n, k)`` times the sum, over all sets of k members that hold this one, of
    their best reward with it less without it. Only a member that would be the best
    of a set counts: with r ascending, ``n / C(n, k) sum_{j<i} C(j, k-2) (r_i - r_j)``.
    A group of fewer than k members is taken with k as its size. Raises ValueError for k < 2.
    """
    if k < 2:
        raise ValueError(f"pass@k compares with the best of k - 1 others, so k must be >= 2, got {k}")
    _check(rewards)
    count = len(rewards)
    found = [0.0] * count
    if _equal(rewards):
        return found
    k = min(k, count)
    order = sorted(range(count), key=rewards.__getitem__)
    sets = math.comb(count, k)
    for rank, member in enumerate(order):
        gains = (math.comb(j, k - 2) * (rewards[member] - rewards[order[j]]) for j in range(rank))
        found[member] = count * math.fsum(gains) / sets
    return found


def batch_std_advantages(groups: Sequence[Sequence[float]], *, epsilon: float = 1e-6) -> list[list[float]]:
    """``(r - mean of the group) / (std of all rewards + epsilon)`` (PPO Lite, arXiv:2508.08221).

    A group is weighed by how far its rewards spread, and not by how rare a difference in it is.
    """
    everyone = list(chain.from_iterable(groups))
    _check(everyone, epsilon)
    if _equal(everyone):
        return [[0.0] * len(group) for group in groups]
    scale = _std(_deviations(everyone)) + epsilon
    return [[d / scale for d in group_advantages(group, normalize_std=False)] for group in groups]


def returns_to_go(rewards_T: Sequence[float], gamma: float = 1.0) -> list[float]:
    """The discounted sum of what comes at and after each token."""
    found, total = [0.0] * len(rewards_T), 0.0
    for index in reversed(range(len(rewards_T))):
        found[index] = total = rewards_T[index] + gamma * total
    return found


def whitened(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """REINFORCE++ (arXiv:2501.03262): ``(x - mean) / sqrt(var + 1e-8)`` over all tokens of the batch.

    ``rows`` holds the returns of each trajectory's sampled tokens, or, for the
    variant with a baseline, the same less the mean reward of its group. The variance
    is the sample's (n - 1). Values that are all equal become exactly 0.
    """
    everyone = list(chain.from_iterable(rows))
    _check(everyone)
    if _equal(everyone):
        return [[0.0] * len(row) for row in rows]
    mean = math.fsum(value / len(everyone) for value in everyone)
    scale = math.hypot(_std([value - mean for value in everyone]), 1e-4)
    return [[(value - mean) / scale for value in row] for row in rows]


def gae(
    rewards_T: Sequence[float], values_T: Sequence[float], *, gamma: float = 1.0, decay: float = 0.95
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation (arXiv:1506.02438): (advantages, returns) of one trajectory.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma decay A_{t+1}``,
    with 0 after the last token. T runs over sampled tokens only, so a value is
    carried over the tokens of a prompt or a tool between two turns. Returns are
    ``A + V``: what a value head is trained towards. Raises ValueError where the
    lengths differ.
    """
    if len(rewards_T) != len(values_T):
        raise ValueError(f"{len(rewards_T)} rewards and {len(values_T)} values")
    following = [*values_T[1:], 0.0]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards_T, following, values_T, strict=True)]
    advantages = returns_to_go(deltas, gamma * decay)
    return advantages, [a + v for a, v in zip(advantages, values_T, strict=True)]


def _check(rewards: Sequence[float], epsilon: float = 0.0) -> None:
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be finite and >= 0, got {epsilon}")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{index}] is not finite: {reward}")


def _equal(rewards: Sequence[float]) -> bool:
    """Whether there are fewer than two, or they differ by rounding only."""
    if len(rewards) < 2:
        return True
    least, most = min(rewards), max(rewards)
    return most - least <= ROUNDING * max(1.0, abs(least), abs(most))


def _deviations(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    return [reward - mean for reward in rewards]


def _std(deviations: Sequence[float]) -> float:
    # hypot does not overflow or underflow where a sum of squares would.
    return math.hypot(*deviations) / math.sqrt(len(deviations) - 1)
