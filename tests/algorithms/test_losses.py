"""The loss of each target: by hand on three tokens, against the formula in double precision, at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.forest import naive_loss
from palestra.algorithms.losses import target_loss
from palestra.batches import LossSpec


def graded(spec: LossSpec, logprobs: list[float], old: list[float] | None, weights: list[float]):
    """(terms, clipped, gradient) as lists."""
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    before = None if old is None else torch.tensor(old, dtype=torch.float64)
    terms, clipped = target_loss(spec, leaf, before, torch.tensor(weights, dtype=torch.float64))
    (grad,) = torch.autograd.grad(terms.sum(), leaf)
    return terms.tolist(), clipped.tolist(), grad.tolist()


def test_policy_loss_by_hand_on_three_tokens() -> None:
    # Ratios 1.5, 0.5, 1.1 with clip 0.2: the first (w > 0) is clipped at 1.2, the second (w < 0) at 0.8.
    old = [-2.0, -1.0, -0.5]
    logprobs = [o + math.log(r) for o, r in zip(old, (1.5, 0.5, 1.1), strict=True)]
    terms, clipped, grad = graded(LossSpec(), logprobs, old, [2.0, -1.0, 1.0])
    assert terms == pytest.approx([-2.4, 0.8, -1.1])
    assert clipped == [True, True, False]
    assert grad == pytest.approx([0.0, 0.0, -1.1])


def test_the_pessimistic_side_is_never_clipped() -> None:
    # A bad token whose ratio grew, a good one whose ratio shrank: the minimum keeps the ratio.
    old = [-2.0, -2.0]
    logprobs = [-2.0 + math.log(1.5), -2.0 + math.log(0.5)]
    terms, clipped, grad = graded(LossSpec(), logprobs, old, [-1.0, 1.0])
    assert terms == pytest.approx([1.5, -0.5])
    assert clipped == [False, False]
    assert grad == pytest.approx([1.5, -0.5])


def test_clip_higher_has_a_side_of_its_own() -> None:
    """DAPO (arXiv:2503.14476): 0.2 below, 0.28 above."""
    logprobs = [-1.0 + math.log(1.25), -1.0 + math.log(1.3), -1.0 + math.log(0.75)]
    terms, clipped, _ = graded(LossSpec(clip_low=0.2, clip_high=0.28), logprobs, [-1.0] * 3, [1.0, 1.0, -1.0])
    assert terms == pytest.approx([-1.25, -1.28, 0.8])
    assert clipped == [False, True, True]


def test_without_old_logprobs_the_ratio_is_exactly_one_and_the_gradient_that_of_the_logprob() -> None:
    terms, clipped, grad = graded(LossSpec(), [-3.0, -0.1, -7.0], None, [0.5, -0.25, 0.0])
    assert terms == [-0.5, 0.25, 0.0]
    assert clipped == [False] * 3
    assert grad == [-0.5, 0.25, 0.0]


def test_a_clip_of_zero_clips_nothing_while_the_ratio_is_one() -> None:
    _, clipped, grad = graded(LossSpec(clip_low=0, clip_high=0), [-3.0, -1.0], None, [1.0, -1.0])
    assert clipped == [False, False]
    assert grad == [-1.0, 1.0]


def test_nll_by_hand() -> None:
    terms, clipped, grad = graded(LossSpec("nll"), [-1.0, -2.0, -4.0], [-9.0] * 3, [0.25, 0.25, 0.5])
    assert terms == [0.25, 0.5, 2.0]
    assert clipped == [False] * 3
    assert grad == [-0.25, -0.25, -0.5]


def test_a_clipped_ratio_that_overflows_has_a_zero_gradient_and_not_nan() -> None:
    leaf = torch.tensor([-0.5, -0.5], requires_grad=True)
    terms, clipped = target_loss(LossSpec(), leaf, torch.tensor([-500.0, -0.5]), torch.tensor([1.0, 1.0]))
    (grad,) = torch.autograd.grad(terms.sum(), leaf)
    assert terms.tolist() == pytest.approx([-1.2, -1.0])
    assert clipped.tolist() == [True, False]
    assert grad.tolist() == [0.0, -1.0]


rows = st.lists(
    st.tuples(st.floats(-8, -0.01), st.floats(-1.5, 1.5), st.floats(-2, 2)), min_size=1, max_size=12
)


@given(rows, st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (0.9, 3.0)]))
def test_policy_loss_and_gradient_equal_the_paper_in_double_precision(
    rows: list[tuple[float, float, float]], clip: tuple[float, float]
) -> None:
    spec = LossSpec(clip_low=clip[0], clip_high=clip[1])
    # A ratio exactly on the clip has two subgradients; both are right, so the comparison leaves it out.
    edges = (math.log1p(clip[1]), math.log1p(-clip[0]))
    rows = [r for r in rows if all(abs(r[1] - edge) > 1e-9 for edge in edges)] or [(-1.0, 0.05, 1.0)]
    old = torch.tensor([r[0] for r in rows], dtype=torch.float64)
    weights = torch.tensor([r[2] for r in rows], dtype=torch.float64)
    grads = []
    for loss in (naive_loss, lambda *a: target_loss(*a).terms_N.sum()):
        leaf = (old + torch.tensor([r[1] for r in rows], dtype=torch.float64)).requires_grad_()
        value = loss(spec, leaf, old, weights)
        grads.append((value.detach(), *torch.autograd.grad(value, leaf)))
    torch.testing.assert_close(grads[1][0], grads[0][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[1][1], grads[0][1], rtol=1e-12, atol=1e-12)


@given(st.integers(1, 11))
def test_terms_do_not_depend_on_the_chunk_they_are_computed_in(cut: int) -> None:
    """Case 11 (trl#4772): a term sees its own target only."""
    torch.manual_seed(cut)
    logprobs, old, weights = -torch.rand(12) * 3, -torch.rand(12) * 3, torch.randn(12)
    whole = target_loss(LossSpec(), logprobs, old, weights)
    pieces = [
        target_loss(LossSpec(), logprobs[s], old[s], weights[s]) for s in (slice(0, cut), slice(cut, 12))
    ]
    assert torch.equal(torch.cat([p.terms_N for p in pieces]), whole.terms_N)
    assert torch.equal(torch.cat([p.clipped_N for p in pieces]), whole.clipped_N)
