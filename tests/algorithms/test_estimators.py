"""Advantages beyond GRPO's: by hand, against their definitions, and what they estimate, by enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.algorithms.advantages import (
    batch_std_advantages,
    gae,
    group_advantages,
    maxrl_advantages,
    pass_at_k_advantages,
    returns_to_go,
    rloo_advantages,
    whitened,
)

some_rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=9)
Estimator = Callable[[Sequence[float]], list[float]]


ESTIMATORS: list[Estimator] = [
    rloo_advantages,
    maxrl_advantages,
    lambda rewards: pass_at_k_advantages(rewards, 2),
    lambda rewards: batch_std_advantages([rewards])[0],
    lambda rewards: whitened([rewards])[0],
]


def expected_gradient(estimator: Estimator, n: int, p: float) -> float:
    """The exact mean of ``1/n sum_i A_i d log p(x_i) / dp`` over all 2^n outcomes of n coins of chance p."""
    total = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=n):
        chance = math.prod(p if x else 1 - p for x in outcome)
        scores = (1 / p if x else -1 / (1 - p) for x in outcome)
        total += chance * sum(a * s for a, s in zip(estimator(outcome), scores, strict=True)) / n
    return total


# -- RLOO


def test_rloo_by_hand() -> None:
    assert rloo_advantages([1.0, 0.0, 5.0]) == pytest.approx([1 - 2.5, 0 - 3.0, 5 - 0.5])


@given(some_rewards)
def test_rloo_is_the_reward_less_the_mean_of_the_others(rewards: list[float]) -> None:
    found = rloo_advantages(rewards)
    if len(rewards) < 2:
        assert found == [0.0]
        return
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    assert found == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)], abs=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_rloo_estimates_the_gradient_of_the_chance_of_success_without_bias(p: float) -> None:
    assert expected_gradient(rloo_advantages, 4, p) == pytest.approx(1.0)


# -- MaxRL


def test_maxrl_by_hand() -> None:
    assert maxrl_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert maxrl_advantages([1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_maxrl_estimates_the_likelihoods_gradient_cut_off_after_n_minus_one_orders(n: int, p: float) -> None:
    """log p is -sum_k (1-p)^k / k, so n - 1 orders have the gradient sum_{k<n} (1-p)^(k-1)."""
    cut_off = sum((1 - p) ** (k - 1) for k in range(1, n))
    assert expected_gradient(maxrl_advantages, n, p) == pytest.approx(cut_off)


def test_maxrl_refuses_a_negative_reward_and_takes_a_group_of_zeros() -> None:
    with pytest.raises(ValueError, match="no reward may be negative"):
        maxrl_advantages([1.0, -0.5])
    assert maxrl_advantages([0.0, 0.0]) == [0.0, 0.0]


# -- pass@k


def test_pass_at_two_by_hand_rewards_only_what_would_be_the_best_of_a_pair() -> None:
    # Pairs of (0, 1, 3): the 1 is better by 1 once, the 3 by 3 and by 2; 3 members over 3 pairs.
    assert pass_at_k_advantages([0.0, 3.0, 1.0], 2) == pytest.approx([0.0, 5.0, 1.0])


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=7), st.integers(2, 7))
def test_pass_at_k_is_the_sum_over_all_sets_of_what_a_member_adds(rewards: list[float], k: int) -> None:
    n = len(rewards)
    k = min(k, n)
    if max(rewards) - min(rewards) <= 1e-9:
        return
    added = [0.0] * n
    for chosen in itertools.combinations(range(n), k):
        for member in chosen:
            without = max(rewards[i] for i in chosen if i != member)
            added[member] += max(rewards[member], without) - without
    expected = [n * a / math.comb(n, k) for a in added]
    assert pass_at_k_advantages(rewards, k) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize(("n", "k"), [(2, 2), (4, 2), (5, 3), (4, 4)])
def test_pass_at_k_estimates_the_gradient_of_success_in_k_tries_without_bias(
    n: int, k: int, p: float
) -> None:
    exact = k * (1 - p) ** (k - 1)
    assert expected_gradient(lambda r: pass_at_k_advantages(r, k), n, p) == pytest.approx(exact)


def test_a_group_that_abstentions_made_smaller_than_k_is_taken_whole() -> None:
    """Case 18 (slime#1414): ragged groups."""
    assert pass_at_k_advantages([0.0, 1.0], 4) == pass_at_k_advantages([0.0, 1.0], 2)
    assert pass_at_k_advantages([1.0], 4) == [0.0]
    with pytest.raises(ValueError, match="k must be >= 2"):
        pass_at_k_advantages([0.0, 1.0], 1)


# -- over the batch


def test_batch_std_by_hand_divides_all_groups_by_one_deviation() -> None:
    found = batch_std_advantages([[0.0, 2.0], [5.0, 5.0]], epsilon=0.0)
    std = math.sqrt((9 + 1 + 4 + 4) / 3)
    assert found[0] == pytest.approx([-1 / std, 1 / std])
    assert found[1] == [0.0, 0.0]
    assert batch_std_advantages([[1.0, 1.0], [1.0]]) == [[0.0, 0.0], [0.0]]


def test_reinforce_plus_plus_by_hand_whitens_over_tokens_and_not_over_replies() -> None:
    # Returns 1, 1, 1 and 0: mean 3/4, sample variance (3/16 + 9/16) / 3 = 1/4.
    found = whitened([[1.0, 1.0, 1.0], [0.0]])
    assert found[0] == pytest.approx([0.5] * 3, rel=1e-6)
    assert found[1] == pytest.approx([-1.5], rel=1e-6)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=5))
def test_whitened_tokens_have_mean_zero_and_deviation_one_or_are_all_zero(rows: list[list[float]]) -> None:
    flat = [x for row in whitened(rows) for x in row]
    assert sum(flat) == pytest.approx(0.0, abs=1e-6)
    values = [x for row in rows for x in row]
    if max(values) - min(values) > 0.1:
        variance = sum(x * x for x in flat) / (len(flat) - 1)
        assert variance == pytest.approx(1.0, rel=1e-4)
    elif max(values) == min(values):
        assert flat == [0.0] * len(flat)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[], [0.3], [0.1 + 0.2, 0.3], [1.0] * 7])
def test_rewards_that_do_not_differ_give_exactly_zero(estimator: Estimator, rewards: list[float]) -> None:
    """Case 30 (training-gym tutorial 002)."""
    assert estimator(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("estimator", [group_advantages, *ESTIMATORS])
def test_a_reward_that_is_not_finite_is_refused(estimator: Estimator) -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] is not finite"):
        estimator([0.0, math.nan])


# -- values over time


def test_returns_to_go_by_hand() -> None:
    assert returns_to_go([0.0, 1.0, 2.0]) == [3.0, 3.0, 2.0]
    assert returns_to_go([0.0, 1.0, 2.0], 0.5) == [1.0, 2.0, 2.0]
    assert returns_to_go([]) == []


def test_gae_by_hand_on_three_tokens() -> None:
    # deltas: 0 + .5*2 - 1 = 0, 0 + .5*4 - 2 = 0, 8 + 0 - 4 = 4; A: 4, then 0 + .25*4 = 1, then .25
    advantages, returns = gae([0.0, 0.0, 8.0], [1.0, 2.0, 4.0], gamma=0.5, decay=0.5)
    assert advantages == pytest.approx([0.25, 1.0, 4.0])
    assert returns == pytest.approx([1.25, 3.0, 8.0])


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=8), st.floats(0, 1))
def test_gae_equals_its_definition_as_a_sum_of_discounted_errors(
    steps: list[tuple[float, float]], decay: float
) -> None:
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    after = [*values[1:], 0.0]
    errors = [r + 0.9 * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    expected = [
        sum((0.9 * decay) ** (later - t) * errors[later] for later in range(t, len(errors)))
        for t in range(len(errors))
    ]
    found, _ = gae(rewards, values, gamma=0.9, decay=decay)
    assert found == pytest.approx(expected, abs=1e-9)


def test_gae_without_decay_is_the_return_less_the_value() -> None:
    advantages, returns = gae([1.0, 0.0, 2.0], [0.5, 0.25, -1.0], gamma=1.0, decay=1.0)
    assert returns == pytest.approx(returns_to_go([1.0, 0.0, 2.0]))
    assert advantages == pytest.approx([2.5, 1.75, 3.0])


def test_gae_refuses_columns_of_two_lengths() -> None:
    with pytest.raises(ValueError, match="2 rewards and 1 values"):
        gae([0.0, 1.0], [0.0])
