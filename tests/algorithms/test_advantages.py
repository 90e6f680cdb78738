"""A group's advantages: the papers' formulas by hand, and what must hold for every group."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.algorithms.advantages import group_advantages

rewards_lists = st.lists(st.floats(-1e6, 1e6), min_size=0, max_size=12)


def test_grpo_by_hand_uses_the_sample_standard_deviation() -> None:
    # mean 0.25; deviations -1/4, -1/4, -1/4, 3/4; sum of squares 12/16; over n - 1 = 3: variance 1/4, std 1/2
    found = group_advantages([0.0, 0.0, 0.0, 1.0], epsilon=0.0)
    assert found == pytest.approx([-0.5, -0.5, -0.5, 1.5])


def test_epsilon_is_added_to_the_deviation_and_not_to_the_variance() -> None:
    found = group_advantages([0.0, 0.0, 0.0, 1.0], epsilon=0.5)
    assert found == pytest.approx([-0.25, -0.25, -0.25, 0.75])


def test_dr_grpo_by_hand_only_subtracts_the_mean() -> None:
    assert group_advantages([1.0, 2.0, 6.0], normalize_std=False) == pytest.approx([-2.0, -1.0, 3.0])


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_single_member_has_advantage_zero_and_not_nan(normalize_std: bool) -> None:
    """Case 30 (training-gym tutorial 002) and case 18: a group of one has no baseline but itself."""
    assert group_advantages([0.7], normalize_std=normalize_std) == [0.0]


def test_an_empty_group_has_no_advantages() -> None:
    assert group_advantages([]) == []


@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7, 1e300, 5e-324])
@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero_whatever_the_mean_rounds_to(value: float, count: int) -> None:
    assert group_advantages([value] * count) == [0.0] * count


@pytest.mark.parametrize("scale", [1e-3, 1.0, -1.0, 1e6])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_rewards_that_differ_by_rounding_only_are_equal(scale: float, normalize_std: bool) -> None:
    """Parts summed in another order, (0.1 + 0.2) + 0.3 and 0.1 + (0.2 + 0.3), are no preference."""
    rewards = [scale * ((0.1 + 0.2) + 0.3), scale * (0.1 + (0.2 + 0.3)), scale * 0.6]
    assert len(set(rewards)) > 1
    assert group_advantages(rewards, normalize_std=normalize_std, epsilon=0.0) == [0.0] * 3


def test_rewards_that_differ_by_little_but_truly_are_compared() -> None:
    assert group_advantages([1.0, 1.0 + 1e-9], epsilon=0.0) == pytest.approx([-(2**-0.5), 2**-0.5])
    assert group_advantages([1e9, 1e9 + 0.5], epsilon=0.0) == pytest.approx([-(2**-0.5), 2**-0.5])


def test_groups_of_unequal_size_are_each_normalised_over_their_own_members() -> None:
    """Case 18 (slime#1414, #2230, AReaL#1419): a fixed stride mixed uneven groups."""
    groups = [[0.0, 1.0], [1.0, 0.0, 0.0], [0.5], [0.0, 1.0, 1.0, 1.0, 0.0]]
    for rewards in groups:
        found = group_advantages(rewards, epsilon=0.0)
        assert len(found) == len(rewards)
        assert math.fsum(found) == pytest.approx(0.0, abs=1e-12)
        if len(rewards) > 1:
            mean = sum(rewards) / len(rewards)
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
            assert found == pytest.approx([(r - mean) / std for r in rewards])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_its_index(bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards\[1\] is not finite"):
        group_advantages([0.0, bad])


@pytest.mark.parametrize("bad", [-1e-6, math.nan, math.inf])
def test_an_epsilon_that_makes_no_sense_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="epsilon"):
        group_advantages([0.0, 1.0], epsilon=bad)


@given(rewards_lists, st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(
    rewards: list[float], normalize_std: bool
) -> None:
    found = group_advantages(rewards, normalize_std=normalize_std)
    assert len(found) == len(rewards)
    assert all(map(math.isfinite, found))
    size = max((abs(a) for a in found), default=0.0)
    spread = max(map(abs, rewards), default=0.0)
    assert abs(math.fsum(found)) <= 1e-9 * len(found) * max(size, spread, 1.0)
    pairs = sorted(zip(rewards, found, strict=True))
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(pairs))


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=10), st.integers(1, 100), st.integers(-100, 100))
def test_normalised_advantages_do_not_change_under_shift_and_scale_of_the_rewards(
    rewards: list[int], scale: int, shift: int
) -> None:
    plain = group_advantages(rewards, epsilon=0.0)
    moved = group_advantages([scale * r + shift for r in rewards], epsilon=0.0)
    assert moved == pytest.approx(plain, abs=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=10), st.randoms())
def test_the_order_of_the_members_does_not_matter(rewards: list[float], shuffle) -> None:
    order = list(range(len(rewards)))
    shuffle.shuffle(order)
    plain = group_advantages(rewards)
    assert group_advantages([rewards[i] for i in order]) == pytest.approx([plain[i] for i in order], abs=1e-9)


def test_enormous_rewards_do_not_overflow_the_deviation() -> None:
    assert group_advantages([1e200, -1e200], epsilon=0.0) == pytest.approx([2**-0.5, -(2**-0.5)])
