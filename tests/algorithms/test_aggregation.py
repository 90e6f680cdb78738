"""A token's weight: by hand, and what must hold whatever the lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.algorithms.aggregation import Aggregate, token_weights

lengths_lists = st.lists(st.integers(1, 50), min_size=1, max_size=10)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token", [1 / 6, 1 / 6, 1 / 6]),
        ("sequence", [1 / 3, 1 / 6, 1 / 9]),
        ("constant", [1 / 30, 1 / 30, 1 / 30]),
        ("sum", [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_three_replies_of_one_two_and_three_tokens_by_hand(
    aggregate: Aggregate, expected: list[float]
) -> None:
    assert token_weights([1, 2, 3], aggregate, 10) == pytest.approx(expected)


@given(lengths_lists)
def test_the_two_means_weigh_one_in_all(lengths: list[int]) -> None:
    for aggregate in ("token", "sequence"):
        weights = token_weights(lengths, aggregate, 50)
        assert sum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(1.0)


@given(lengths_lists, st.integers(0, 9))
def test_a_sequences_share_depends_on_its_length_only_where_it_should(lengths: list[int], at: int) -> None:
    at %= len(lengths)
    shares = {
        aggregate: token_weights(lengths, aggregate, 50)[at] * lengths[at]  # type: ignore[arg-type]
        for aggregate in ("sequence", "constant", "sum")
    }
    count = len(lengths)
    assert shares["sequence"] == pytest.approx(1 / count)
    assert shares["constant"] == pytest.approx(lengths[at] / 50 / count)
    assert shares["sum"] == pytest.approx(lengths[at] / count)


def test_nothing_weighs_nothing_and_nonsense_is_refused() -> None:
    assert token_weights([], "token", 5) == []
    with pytest.raises(ValueError, match="no aggregate 'mean'"):
        token_weights([1], "mean", 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=">= 1"):
        token_weights([2, 0], "token", 5)
    with pytest.raises(ValueError, match="longest 0"):
        token_weights([2], "constant", 0)
