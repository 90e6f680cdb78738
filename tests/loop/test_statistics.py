from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.loop.statistics import mean_interval, student_t95, wilson_interval


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_t_quantiles_equal_the_printed_table(degrees: int, quantile: float) -> None:
    assert student_t95(degrees) == pytest.approx(quantile, abs=0.006)


def test_wilson_equals_a_hand_computed_value() -> None:
    interval = wilson_interval(8, 10)
    assert (interval.low, interval.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


@given(n=st.integers(1, 500), share=st.floats(0, 1))
def test_wilson_holds_its_mean_and_stays_a_proportion(n: int, share: float) -> None:
    interval = wilson_interval(share * n, n)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.high - interval.low > 0


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 3), (4, 3)])
def test_wilson_refuses_what_is_no_proportion(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="not a proportion"):
        wilson_interval(successes, n)


def test_repeated_samples_of_one_task_do_not_narrow_the_interval() -> None:
    few = mean_interval([[0.0], [1.0], [1.0]], 0, 1)
    many = mean_interval([[0.0] * 100, [1.0] * 100, [1.0] * 100], 0, 1)
    assert few == many


def test_equal_tasks_do_not_claim_certainty() -> None:
    interval = mean_interval([[1.0]] * 9, 0, 1)
    assert interval.mean == 1.0
    assert interval.low < 0.75
    assert mean_interval([[0.5]], 0, 1).high - mean_interval([[0.5]], 0, 1).low > 0.8


def test_tasks_without_a_score_are_left_out() -> None:
    assert mean_interval([[], [0.25, 0.75], []], 0, 1).n == 1
    with pytest.raises(ValueError, match="no sample"):
        mean_interval([[], []], 0, 1)


def test_intervals_cover_the_truth_about_as_often_as_they_claim() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(600):
        rates = [rng.betavariate(2, 2) for _ in range(25)]
        samples = [[float(rng.random() < rate) for _ in range(4)] for rate in rates]
        interval = mean_interval(samples, 0, 1)
        covered += interval.low <= 0.5 <= interval.high
    assert 0.92 <= covered / 600 <= 0.98
