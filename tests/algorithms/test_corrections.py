"""Factors for tokens that another policy sampled: by hand, against the definitions, at the edges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.algorithms.corrections import KINDS, Corrected, Correction

# Two sequences: ratios 2, 1/2 and 4; and 1/4 alone.
OLD = [-1.0] * 4
SAMPLER = [-1.0 - math.log(2), -1.0 + math.log(2), -1.0 - math.log(4), -1.0 + math.log(4)]
IDS = [0, 0, 0, 1]
WEIGHTS = [1.0, 1.0, 1.0, -1.0]


def corrected(text: str, weights: list[float] = WEIGHTS) -> Corrected:
    correction = Correction.parse(text)
    assert correction is not None
    return correction.factors(OLD, SAMPLER, IDS, weights)


@pytest.mark.parametrize(
    ("text", "factors", "capped", "masked"),
    [
        ("tis:3", [2, 0.5, 3, 0.25], 0.25, 0.0),
        ("tis:0.5:3", [2, 0.5, 3, 0.5], 0.5, 0.0),
        ("tis-sequence:3", [3, 3, 3, 0.25], 0.75, 0.0),
        ("mis:3", [0, 0, 0, 0.25], 0.0, 0.75),
        ("mis:0.5:5", [4, 4, 4, 0], 0.0, 0.25),
        ("icepop:0.4:3", [2, 0.5, 0, 0], 0.0, 0.5),
        ("geometric:0.5:2", [2, 0.5, 4, 0], 0.0, 0.25),  # the first sequence's mean ratio is 4 ** (1/3)
        ("geometric:0.5:1.5", [0, 0, 0, 0], 0.0, 1.0),
        ("negatives:0.5:1", [1, 1, 1, 0], 0.0, 0.25),
    ],
)
def test_every_kind_by_hand(text: str, factors: list[float], capped: float, masked: float) -> None:
    found = corrected(text)
    assert list(found.factors_N) == pytest.approx(factors)
    assert (found.capped, found.masked) == (capped, masked)


def test_an_off_policy_sequence_is_masked_only_where_its_advantage_is_negative() -> None:
    """DeepSeek-V3.2 (arXiv:2512.02556), eq. 9."""
    assert list(corrected("negatives:0.5:1", [-1.0, -1.0, -1.0, 1.0]).factors_N) == [1.0] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_where_engine_and_trainer_agree_every_factor_is_exactly_one(kind: str) -> None:
    correction = Correction.parse(kind)
    assert correction is not None
    found = correction.factors(OLD, OLD, IDS, WEIGHTS)
    assert list(found.factors_N) == [1.0] * 4
    assert (found.capped, found.masked) == (0.0, 0.0)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.integers(0, 3)), min_size=1, max_size=12))
@pytest.mark.parametrize("kind", KINDS)
def test_factors_are_finite_never_negative_and_do_not_depend_on_order(
    kind: str, rows: list[tuple[float, float, int]]
) -> None:
    """Case 11 (trl#4772): a ratio that exploded."""
    correction = Correction.parse(kind)
    assert correction is not None
    columns = [list(column) for column in zip(*rows, strict=True)]
    weights = [-1.0 if row[2] % 2 else 1.0 for row in rows]
    found = correction.factors(columns[0], columns[1], columns[2], weights)
    assert all(math.isfinite(factor) and factor >= 0 for factor in found.factors_N)
    turned = correction.factors(columns[0][::-1], columns[1][::-1], columns[2][::-1], weights[::-1])
    assert list(turned.factors_N)[::-1] == list(found.factors_N)


def test_a_product_over_a_long_sequence_does_not_overflow() -> None:
    count = 5000
    correction = Correction.parse("tis-sequence:2")
    assert correction is not None
    found = correction.factors([-1.0] * count, [-3.0] * count, [0] * count, [1.0] * count)
    assert list(found.factors_N) == pytest.approx([2.0] * count)


def test_a_batch_without_targets_has_no_factors() -> None:
    correction = Correction.parse("mis")
    assert correction is not None
    found = correction.factors([], [], [], [])
    assert (list(found.factors_N), found.capped, found.masked) == ([], 0.0, 0.0)


def test_columns_of_two_lengths_are_refused() -> None:
    correction = Correction.parse("tis")
    assert correction is not None
    with pytest.raises(ValueError, match=r"longer|shorter"):
        correction.factors([-1.0], [-1.0, -2.0], [0, 0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("tis", 0.0, 2.0),
        ("tis:3", 0.0, 3.0),
        ("icepop", 0.5, 5.0),
        ("icepop:4", 0.25, 4.0),
        ("icepop:0.1:10", 0.1, 10.0),
        ("geometric:2", 0.5, 2.0),
        ("mis:3", 0.0, 3.0),
    ],
)
def test_limits_are_read_from_the_name(text: str, low: float, high: float) -> None:
    found = Correction.parse(text)
    assert found is not None
    assert (found.kind, found.low, found.high) == (text.partition(":")[0], low, high)
    assert Correction.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clip", "expected none, or one of tis, tis-sequence, mis"),
        ("none:2", "expected none"),
        ("tis:1:2:3", "expected none"),
        ("tis:two", "the limits of tis are numbers, as in tis:2"),
        ("tis:0.5", "LOW <= 1 <= HIGH"),
        ("icepop:2:1", "LOW <= 1 <= HIGH"),
        ("icepop:nan", "LOW <= 1 <= HIGH"),
        ("mis:inf", "LOW <= 1 <= HIGH"),
        ("tis:-1:2", "LOW <= 1 <= HIGH"),
    ],
)
def test_a_correction_that_makes_no_sense_is_refused_with_what_does(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction.parse(text)


def test_none_is_no_correction() -> None:
    assert Correction.parse("none") is None
