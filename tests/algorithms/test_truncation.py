"""The edge below which tokens are left out, by hand and against the definition token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.algorithms.truncation import least_kept


def kept(logits: list[float] | Tensor, top_k: int = 0, top_p: float = 1.0) -> list[bool]:
    row = torch.as_tensor(logits)[None]
    return (row >= least_kept(row, [top_k], [top_p])[:, None])[0].tolist()


def test_nothing_is_left_out_where_both_are_off() -> None:
    assert least_kept(torch.randn(2, 9), [0, 9], [1.0, 1.0]).tolist() == [-math.inf, -math.inf]
    assert least_kept(torch.randn(1, 9), [20], [1.0]).tolist() == [-math.inf]


def test_ties_at_the_kth_logit_are_all_kept() -> None:
    assert kept([3.0, 1.0, 1.0, 0.0], top_k=2) == [True, True, True, False]
    assert kept([1.0, 2.0, 2.0, 2.0, 0.0], top_k=2) == [False, True, True, True, False]


@pytest.mark.parametrize(("top_p", "count"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (0.999, 4)])
def test_top_p_keeps_the_token_that_crosses_it_and_none_after(top_p: float, count: int) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125 * 0.999]).log()
    assert kept(logits, top_p=top_p) == [True] * count + [False] * (4 - count)


def test_top_p_looks_at_what_top_k_left_renormalised() -> None:
    # 0.4, 0.3, 0.2, 0.1: top-k 2 leaves 4/7 and 3/7, so top-p 0.55 is reached by the first alone.
    assert kept(torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), top_k=2, top_p=0.55) == [True, False, False, False]


def test_top_p_never_brings_back_what_top_k_left_out() -> None:
    """A mass that rounding may keep out of reach: what is left sums to 1, and nearly all of it is wanted."""
    logits = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 1e-3
    assert sum(kept(logits, top_k=1500, top_p=1 - 2**-53)) <= 1500


def test_the_most_probable_token_always_stays() -> None:
    assert kept([0.0, 5.0, 1.0], top_k=1, top_p=1e-9) == [False, True, False]


def test_rows_with_different_settings_do_not_disturb_each_other() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    top_k, top_p = [0, 3, 0, 50, 7, 1], [1.0, 1.0, 0.5, 0.9, 0.3, 1.0]
    together = least_kept(logits, top_k, top_p)
    for row in range(6):
        alone = least_kept(logits[row : row + 1], top_k[row : row + 1], top_p[row : row + 1])
        assert together[row] == alone[0]


@settings(max_examples=100, deadline=None)
@given(
    eighths=st.lists(st.integers(-40, 40), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
)
def test_what_is_kept_is_the_smallest_set_that_reaches_both(
    eighths: list[int], top_k: int, top_p: float
) -> None:
    """Logits in eighths: a tie is a tie in every number type."""
    logits = [value / 8 for value in eighths]
    order = sorted(logits, reverse=True)
    if top_k:
        order = [value for value in order if value >= order[min(top_k, len(order)) - 1]]
    total = math.fsum(math.exp(value) for value in order)
    mass, edge = 0.0, order[-1]
    for value in order:
        mass += math.exp(value) / total
        if abs(mass - top_p) < 1e-9 and top_p < 1:
            return  # rounding alone decides
        if mass >= top_p:
            edge = value
            break
    assert kept(logits, top_k, top_p) == [value >= edge for value in logits]
